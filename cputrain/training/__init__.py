"""Training and evaluation in one rank.

entry.py runs one rank of `cputrain train` and, for a user's script, `cputrain.train`; evaluation.py runs `cputrain
eval`. Both first open a session (session.py): threads, data, process group and engine. loop.py then repeats training
steps (step.py) of network and loss (state.py), notifies watchers.py and log.py after each, evaluates, and saves
checkpoints, which saving.py also restores. signals.py stops all ranks after the same step. The learning-rate schedule
is in cputrain/recipe/derivation.py.
"""

from cputrain import names_of

__getattr__ = names_of(__name__)
