"""Recipes, training, evaluation, batch jobs and sweeps, and the `cputrain` command, on top of `affinity` and `mpi`."""

__version__ = "0.1.0"
