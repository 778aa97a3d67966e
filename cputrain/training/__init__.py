"""Training and evaluation in one rank.

entry.py and eval_entry.py are what `train` and `eval` run, own.py is `cputrain.train` for a user's own code. entry.py
builds a training, loop.py repeats step.py, evaluation.py and saving/, and session.py is what a rank has before that:
recipe, sizes, ranks, data, binding. task.py is what the steps compute with: network, inputs and loss. The learning rate
with its warm-up is in cputrain/optim/schedules.py.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
