"""A run's folder: its files and their names (`folder`), the event log (`events`), which settings a resumed run may
change (`resume`), and what a rank knows of its job's earlier attempts (`attempt`). Nothing here trains.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
