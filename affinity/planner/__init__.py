"""Machine + Request -> Plan: each worker's CPUs, memory, threads and environment, with a reason for every value.

Stages in order: usable_cores, defaults (a profile's or a tuned plan's), domains (with worker_count), worker_sizes (by
rules), core_roles, memory, openmp and oneccl. All are pure. The edge reads files: runtime finds the OpenMP runtime that
a Python loads, records what was measured on this machine, plan_file a plan; this_machine plans this
host with all that they find.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
