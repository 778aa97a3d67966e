"""`cputrain tune`: tries the plans that matter for a training on this machine, and remembers the fastest.

run.py does it from beginning to end. candidates.py lists the plans, result.py decides which of them to measure again,
which has won (pure functions over an injected cost), and what is printed and kept.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
