"""Training and evaluation of a recipe in one rank.

entry.py and eval_entry.py are what `train` and `eval` run. start.py builds a training, loop.py repeats step.py,
evaluation.py and checkpoint.py, and session.py is what a rank has before that: recipe, sizes, ranks, data, binding.
The learning rate with its warm-up is in cputrain/optim/schedules.py.
"""
