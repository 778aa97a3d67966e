"""Studies of machines and trainings, each behind a command: bench, tune, sweep, simulate, reproduce, and find-lr.

find-lr is lr_finder.py. Only the command line imports them: what plans, launches and trains needs no study.
"""
