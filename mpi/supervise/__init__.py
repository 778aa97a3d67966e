"""Supervision of running ranks: start them, label and log their output, watch heartbeats and exits, end all together.

`ranks.py` supervises the ranks that one process starts. `run.py` runs a job. On one host it uses `ranks.py` for all
workers; with a launcher each rank has an agent (`agent.py`), which uses `ranks.py` and reports to a monitor
(`monitor.py`). When a rank fails, the others are ended and the first cause is named (`processes.py`). `activity.py`
reads what a rank does, `stalls.py` finds the rank that the others wait for.
"""
