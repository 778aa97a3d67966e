"""Recipes: a training as data.

schema.py (sections, keys, types, their manual), keys.py (paths, messages and the reference), loading.py (YAML files,
key=value settings, shipped recipes), derivation.py (batch, steps, rates and phases for a number of workers, and the
same in words).
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
