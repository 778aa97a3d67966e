"""The programs that start ranks on hosts: Intel MPI, Open MPI, MPICH, srun, torchrun; and workers of this host alone.

Each launcher is one record (`Launcher`) in a file of its own, which `cputrain launch`, `plan --write`, the job scripts
and the pre-flight use. `job.py` describes a job, `command.py` turns job and record into a command line, `detect.py`
finds what is installed, `script.py` writes a command line as shell text. Nothing here starts a rank.

To add a launcher:

1. Write `mpi/launchers/NAME.py` with one `Launcher(...)`. The fields of `mpi.launchers.launcher.Launcher` explain
   themselves; `mpich.py` is the shortest example, `openmpi.py` has a rankfile.
2. Add the record to `LAUNCHERS` in `table.py`, and the module to the import contract in pyproject.toml.
   `--launcher NAME`, the detection and `cputrain job` then know it.
3. If its ranks are numbered by environment variables of its own, add them to `CONVENTIONS` in `affinity/ranks/rank.py`;
   its name for the job belongs in `JOB_VARIABLES` of `affinity/ranks/rendezvous.py`, the variables' prefix in
   `cputrain/jobs/templates/container.sh.j2`.
4. Run `pytest tests/mpi/test_launch_command.py --update-golden` and read the new files below `tests/golden/launch`; add
   the launcher to `MPI` in `tests/mpi/test_launchers.py`, which starts real ranks with it.
"""
