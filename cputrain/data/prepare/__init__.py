"""`cputrain prepare`: images of any source -> shuffled shards with an index; and checking, counting, showing them."""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
