"""`cputrain find-lr`: a learning rate for a recipe, by a range test. curve.py is the arithmetic, rank.py the steps."""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
