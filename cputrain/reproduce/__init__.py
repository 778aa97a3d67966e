"""Published results again: the large-batch study trained at this machine's size, and the published tables beside the
sizes that our recipes derive.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
