"""Measurements of this machine, each beside its limit in the same run: what `cputrain bench` prints and keeps.

memory.py, decoding.py, all_reduce.py and optimizer.py measure one part each, model.py whole training steps in the
planned workers; model_rank.py and all_reduce_rank.py are what their ranks run.
"""
