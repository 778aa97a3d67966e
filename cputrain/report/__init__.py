"""A run's folder as one HTML page, and live in a terminal: curves, resource use of workers and hosts."""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
