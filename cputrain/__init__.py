"""Recipes, training, evaluation, batch jobs and sweeps, and the `cputrain` command, on top of `affinity` and `mpi`.

`from cputrain import train` trains a network of one's own: see cputrain/training/own.py.
"""

from cputrain.lazy import lazy_names

__version__ = "0.1.0"
__all__ = ["__version__", "train"]

# At its first use, and without naming it for type checkers: the packages below import the version from here.
__getattr__ = lazy_names(__name__, {"train": "training.own"})
