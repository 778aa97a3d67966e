"""Recipes, training, evaluation, batch jobs and sweeps, and the `cputrain` command, on top of `affinity` and `mpi`.

`from cputrain import train` trains a network of one's own: see cputrain/training/entry.py.
"""

# Nothing is imported here: the command is isolated from a user's typing.py or enum.py only once __main__.py runs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "train"]


def __getattr__(name: str) -> "Any":
    """`train` at its first use, and without naming it for type checkers: the packages below import the version."""
    if name != "train":
        raise AttributeError(f"module 'cputrain' has no attribute {name!r}")
    from importlib import import_module

    return import_module("cputrain.training.entry").train
