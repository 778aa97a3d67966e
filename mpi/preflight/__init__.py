"""The check of a job's hosts before it starts: the same software and files, the planned CPUs, memory, a fast link.

`checks.py` inspects one host and compares the reports; `run.py` runs it on all hosts through the job's launcher.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
