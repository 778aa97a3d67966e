"""`cputrain bench`: what this machine reaches, each figure beside its limit.

limits.py measures memory, decoding, all-reduces and optimizers, model.py whole training steps in the planned ranks,
each of which runs recorder.py. figures.py shows what was measured.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
