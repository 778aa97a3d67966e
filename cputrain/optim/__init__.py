"""Optimizers for large batches, usable with any model: `from cputrain.optim import Lars` (or Lamb, AdagradDA).

optimizers.py has these, makes a recipe's optimizer of them and torch's, and measures each layer's weight and gradient
norms; schedules.py has the learning rate and its warm-up as pure functions of the step.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
