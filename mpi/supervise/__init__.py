"""Ranks while they run: started, output labeled and logged, heartbeats and exits watched, all ended together.

`ranks.py` supervises the ranks that one process starts. On one host `local.py` uses it for all workers; over a launcher
each rank has an agent (`agent.py`) that uses it and reports to the monitor (`monitor.py`) of `remote.py`. When a rank
dies, its peers are ended and the first cause is named (`exits.py`).
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
