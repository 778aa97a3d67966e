"""A run: `folder` has its folder, lock and removal, and which settings a resumed run may change, `events` the log of
its events, and that log as CSV, for TensorBoard and as MLPerf's lines. Nothing here trains.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
