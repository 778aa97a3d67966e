"""Predict a training on hosts that are not available: time of a step, efficiency, time to train.

setup.py has the measured rates, predict.py predicts a recipe's job on one and on many hosts, output.py formats it.
cputrain/predict has the model of a step (compute, all-reduce and their overlap), and its constants with their sources.
"""
