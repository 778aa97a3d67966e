"""From a recipe or planning options to bound worker processes: the planner's request, the hosts and their plans, the
job that a launcher starts, and what each rank does before it trains. Batch scripts are in `cputrain.jobs`.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
