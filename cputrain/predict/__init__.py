"""The time of a training step, predicted from machine, network and link; a plan compared with others by it.

layers.py has the operations and bytes of a network's layers, collectives.py the cost of an all-reduce; step_time.py
makes them a step, with their overlap. assumptions.py reads the constants and published runs, with their sources, from
configs/published. host.py is the model of a plan's host; next_best.py compares the plan's numbers with others by it:
`plan_machine(machine, request, compare=compare_plan)`.
"""

from cputrain import lazy_names

__getattr__ = lazy_names(__name__)
