"""Run folders (`folder`: files, lock, removal, resume) and event logs (`events`: writing, reading, export). No training
happens here.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
