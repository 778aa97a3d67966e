"""A process's rank, from any launcher's environment; and the address and port at which the ranks of a job meet."""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
