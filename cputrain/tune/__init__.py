"""`cputrain tune`: tries the plans that matter for a training on this machine, and remembers the fastest.

run.py does it from beginning to end. candidates.py lists the plans, race.py decides which of them to measure again and
which has won (pure functions over an injected cost), trials.py measures one, engines.py is which engines are tried,
and result.py what is printed and kept.
"""
