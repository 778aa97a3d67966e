"""Training and evaluation in one rank.

trainer.py is a training from top to bottom, of `cputrain train` and, by user_code.py, of `cputrain.train`.
evaluation.py runs `cputrain eval`. Both first start a session (session.py): threads, data, process group and engine
(engine.py). A training then builds network, loss and optimizer (building.py, state.py), repeats steps (step.py) on this
rank's batches (batches.py), calls watchers/ after each, evaluates, and saves checkpoints (saving.py), whose content
snapshot.py copies and restores. run_folder.py has what it writes and prints before and after, signals.py how all ranks
stop after the same step. local.py plans a training on this machine and starts its ranks. The learning-rate schedule is
in cputrain/schedule.py.
"""

from cputrain import lazy_names

__getattr__ = lazy_names(__name__)
