"""Encoded images on disk, by number: image folders, shards, TFRecords, tables, tar files, generated data.

`open.detect` recognizes what a folder contains; the Source that it returns is counted or opened. Each format is one
module and a line of `open.FORMATS`.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
