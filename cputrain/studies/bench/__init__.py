"""`cputrain bench`: measure this machine, each figure beside its limit.

limits.py measures memory, decoding, all-reduces and optimizers. model.py measures whole training steps in the planned
ranks, each of which runs recorder.py. operators.py lists the operators that profiled.py has recorded, with
the limits of work.py. figures.py formats the results.
"""
