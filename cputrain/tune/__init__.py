"""`cputrain tune`: tries the plans that matter for a training on this machine, and remembers the fastest.

candidates.py lists the plans; race.py measures them, decides which of them to measure again and which has won (pure
functions over an injected cost), and what is printed and kept.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
