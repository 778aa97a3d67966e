"""Encoded images on disk, by number: image folders, shards, TFRecords, archives, MNIST's files, generated data.

`open.open_dataset` recognizes what a folder contains; `survey` counts it without torch. Each format is one module.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
