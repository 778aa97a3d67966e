"""Predict a training on hosts that are not here: the time of a step, its efficiency, the time to train.

assumptions.py has every constant with its source, step.py the layers of networks, the simulated host and one step
(compute, all-reduce, how they overlap), predict.py predicts a job on one and on many hosts, output.py shows it.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
