"""Ranks while they run: started, output labeled and logged, heartbeats and exits watched, all ended together.

`ranks.py` supervises the ranks that one process starts. `run.py` runs a job: on one host it uses `ranks.py` for all
workers; over a launcher each rank has an agent (`agent.py`) that uses it and reports to a monitor (`monitor.py`). When
a rank dies, its peers are ended and the first cause is named (`processes.py`).
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
