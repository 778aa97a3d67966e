"""The hosts of a job: hostfiles of every launcher, Slurm's folded lists, the scheduler's job around this process.

Hosts that differ form groups of equal hosts, each with a plan of its own (`groups.py`).
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
