"""A run's folder as an HTML page and as a live terminal screen: curves, resource use of workers and hosts."""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
