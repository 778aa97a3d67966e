"""The programs that start ranks on hosts: Intel MPI, Open MPI, MPICH, srun, torchrun; and workers of this host alone.

Each launcher is one record (`Launcher`) in programs.py, which `cputrain launch`, `plan --write`, the job scripts and
the pre-flight use. command.py finds what is installed, and turns a job into its command line or shell text. Nothing
here starts a rank.

docs/contributing/launcher.md tells how to add a launcher.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
