"""A process's rank from any launcher's environment, the rendezvous address of a job's ranks, and host names."""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
