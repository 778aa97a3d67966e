"""The programs that start ranks on hosts: Intel MPI, Open MPI, MPICH, srun, torchrun; and workers of this host alone.

Each launcher is one record (`Launcher`) in a file of its own, which `cputrain launch`, `plan --write`, the job scripts
and the pre-flight use. `job.py` describes a job, `command.py` turns job and record into a command line, `detect.py`
finds what is installed, `script.py` writes a command line as shell text. Nothing here starts a rank.

docs/contributing/launcher.md tells how to add a launcher.
"""
