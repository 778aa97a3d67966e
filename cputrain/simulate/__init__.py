"""Predict a training on hosts that are not available: time of a step, efficiency, time to train.

setup.py has a recipe's layers and the measured rates, predict.py predicts a job on one and on many hosts, output.py
formats it. The constants with their sources are in affinity/planner/assumptions.py; one step (compute, all-reduce and
their overlap) is in step_time.py there.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
