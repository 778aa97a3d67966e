"""Networks: networks.py builds a recipe's network, weights.py loads weights into it."""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
