"""Checkpoints as files, without a network: folder.py knows their places in a run's folder and checkpoint.json,
tensors.py the files of tensors. Nothing here is pickled.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
