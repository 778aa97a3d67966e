"""`cputrain bench`: measure this machine, each figure beside its limit.

limits.py measures memory, decoding, all-reduces and optimizers. model.py measures whole training steps in the planned
ranks, each of which runs recorder.py. figures.py formats the results.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
