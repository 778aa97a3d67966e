"""Predict a training on hosts that are not available: time of a step, efficiency, time to train.

setup.py has a recipe's layers and the measured rates, predict.py predicts a job on one and on many hosts, output.py
formats it. The model of a step (compute, all-reduce and their overlap) and its constants with their sources are in
cputrain/predict.
"""
