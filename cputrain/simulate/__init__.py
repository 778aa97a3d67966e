"""Predict a training on hosts that are not available: time of a step, efficiency, time to train.

assumptions.py loads every constant with its source. step.py has the layers of networks, the simulated host and one
step: compute, all-reduce and their overlap. predict.py predicts a job on one and on many hosts, output.py formats it.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
