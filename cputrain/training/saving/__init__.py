"""Saving and resuming: restore.py copies a rank's state for a checkpoint, puts it back, and finds the newest good one;
saver.py decides what is written when, and writes it in the background.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
