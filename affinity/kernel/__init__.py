"""A plan and the Linux kernel: bind processes as planned, read back what they were given, find bound processes.

Functions that change the process show it in their names: bind_process, exec_bound, set_memory_policy, running_on.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
