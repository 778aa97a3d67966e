"""Optimizers for large batches, usable with any model: `from cputrain.optim import Lars` (or Lamb, AdagradDA).

build.py makes a recipe's optimizer from these and torch's, and measures each layer's weight and gradient norms;
schedules.py has the learning rate and its warm-up as pure functions of the step.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
