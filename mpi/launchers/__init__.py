"""Launchers that start ranks on hosts (Intel MPI, Open MPI, MPICH, srun, torchrun), and workers of this host only.

Each launcher is one record (`Launcher`) in programs.py, used by `cputrain launch`, `plan --write`, the job scripts and
the pre-flight. command.py finds the installed launcher and turns a job into its command line or a shell script. Nothing
here starts a rank.

docs/contributing/launcher.md explains how to add a launcher.
"""
