"""What ranks and their hosts use while they run: CPU time, memory, network.

`sampler.py` reads the counters, `records.py` merges them into records, `file.py` keeps these in usage/*.jsonl.
"""
