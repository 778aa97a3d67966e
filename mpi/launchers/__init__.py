"""The programs that start ranks on hosts: Intel MPI, Open MPI, MPICH, srun, torchrun; and workers of this host alone.

Each launcher is one record (`Launcher`) in programs.py, which `cputrain launch`, `plan --write`, the job scripts and
the pre-flight use. launcher.py describes a job and a launcher, command.py turns them into a command line or shell text,
detect.py finds what is installed. Nothing here starts a rank.

docs/contributing/launcher.md tells how to add a launcher.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
