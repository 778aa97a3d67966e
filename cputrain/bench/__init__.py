"""`cputrain bench`: what this machine reaches, each figure beside its limit.

memory.py, decoding.py and all_reduce.py measure one part each, model.py whole training steps in the planned ranks, each
of which runs recorder.py. figures.py shows what was measured.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
