"""Training and evaluation in one rank.

entry.py is what `train` and, for a user's own code, `cputrain.train` run, evaluation.py what `eval` runs. session.py
is what a rank opens first: threads, data and its batches, process group, engine. entry.py then builds a training, and
loop.py repeats step.py, whose steps watchers.py and log.py hear of, evaluation.py and saving.py, which also puts back
what it has written; signals.py stops all ranks together. The learning rate with its warm-up is in
cputrain/recipe/derivation.py.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
