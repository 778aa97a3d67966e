"""A run's folder as one HTML page: curves from its events, and the resource use of its workers and hosts."""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
