"""What a host has and what it lacks: the facts of a bug report, and checks that name a remedy. Works without torch."""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
