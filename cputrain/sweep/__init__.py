"""Sweeps: which trainings a sweep has, running them one after another, their results, tables and charts.

Also the search for the largest local batch that trains. A repeated sweep continues where the last one stopped.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
