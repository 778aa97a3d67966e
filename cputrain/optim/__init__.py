"""Optimizers for large batches, usable with any model: `from cputrain.optim import Lars` (or Lamb, AdagradDA).

build.py makes a recipe's optimizer from these and torch's, has the learning rate and its warm-up as pure functions of
the step, and measures each layer's weight and gradient norms.
"""

from typing import TYPE_CHECKING

from cputrain.lazy import lazy_names

if TYPE_CHECKING:
    from cputrain.optim.lars import AdagradDA, Lamb, Lars

__all__ = ["AdagradDA", "Lamb", "Lars"]

# The command line reads schedules.py and must not import torch.
__getattr__ = lazy_names(
    __name__,
    {"AdagradDA": "lars", "Lamb": "lars", "Lars": "lars"},
)
