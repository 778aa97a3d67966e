"""The `cputrain` command: recipes, training, evaluation, batch jobs and sweeps, on top of `affinity` and `mpi`.

`from cputrain import train` trains a network of your own: see cputrain/training/entry.py.
"""

# No imports here: only __main__.py protects the command from a user's typing.py or enum.py.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "train"]


def __getattr__(name: str) -> "Any":
    """Import `train` at its first use; untyped, as the packages below import the version from here."""
    if name != "train":
        raise AttributeError(f"module 'cputrain' has no attribute {name!r}")
    from importlib import import_module

    return import_module("cputrain.training.entry").train
