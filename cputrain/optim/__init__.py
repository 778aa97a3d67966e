"""Optimizers for large batches, usable with any model: `from cputrain.optim import Lars` (or Lamb, AdagradDA).

build.py makes a recipe's optimizer from these and torch's; schedules.py has the learning rate and its warm-up as pure
functions of the step; ratios.py measures each layer's weight and gradient norms.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cputrain.optim.adagrad_da import AdagradDA
    from cputrain.optim.lamb import Lamb
    from cputrain.optim.lars import Lars

__all__ = ["AdagradDA", "Lamb", "Lars"]

_MODULES = {"AdagradDA": "adagrad_da", "Lamb": "lamb", "Lars": "lars"}


def __getattr__(name: str) -> Any:
    """Import an optimizer on first use: the command line reads schedules.py and must not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
