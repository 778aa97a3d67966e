"""Recipes: the settings of a training. They are made of the parts' settings, and no part knows them.

schema.py (sections, keys, types, documentation), keys.py (paths of keys, error messages, the reference), loading.py
(YAML files, key=value settings, shipped recipes), derivation.py (batch, steps and learning rates for a number of
workers, with explanations), request.py (what a recipe asks of the planner and the cost model), resume.py (the recipe of
a run, and whether another may continue it).
"""
