"""Recipes: the settings of a training.

schema.py (sections, keys, types, documentation), keys.py (paths of keys, error messages, the reference), loading.py
(YAML files, key=value settings, shipped recipes), derivation.py (batch, steps, learning rates and phases for a number
of workers, with explanations), workload.py (layers, operations, memory and optimizer state).
"""
