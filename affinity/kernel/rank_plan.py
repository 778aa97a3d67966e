"""This host planned by its own ranks: each makes the same plan, as planning is pure."""

import os
from collections.abc import Mapping
from dataclasses import replace

from affinity.kernel.bound_plan import PLAN_VARIABLE
from affinity.planner.plan import Plan, Request
from affinity.planner.this_machine import plan_this_machine
from affinity.ranks.launcher_variables import ENV, LAUNCHER_VARIABLES
from affinity.ranks.rank import Rank
from affinity.topology.sysfs import this_machine

# Names of a rank that a binding by a plan sets, all alike, and a launcher changes.
NAMES_OF_A_PLAN = (
    ENV.rank_names,
    *(each.rank_names for each in LAUNCHER_VARIABLES if each.for_scripts and each.names_suffice),
)


def plan_for_rank(request: Request, rank: Rank, command: tuple[str, ...], env: Mapping[str, str]) -> tuple[Plan, int]:
    """A plan of this host for the ranks that a launcher has started on it, and the index of this rank's worker.

    A binding by the launcher or by an earlier plan is kept: the planner then takes its cores for the whole host.
    """
    machine = this_machine()
    bound = _bound_as(rank, env) or set(machine.allowed_pus) < os.sched_getaffinity(os.getppid())
    ppn, index = (1, 0) if bound else (rank.local_world_size, rank.local_rank)
    full = replace(request, ppn=ppn, nodes=rank.world_size // rank.local_world_size)
    return plan_this_machine(full, env, command, machine=machine), index


def _bound_as(rank: Rank, env: Mapping[str, str]) -> bool:
    """Whether a plan has bound this process, or its parent, as this very rank: all names of the rank then agree, while
    a launcher that a bound process has started changes some of them."""
    ranks = {env.get(names[0]) for names in NAMES_OF_A_PLAN}
    sizes = {env.get(names[1]) for names in NAMES_OF_A_PLAN}
    return PLAN_VARIABLE in env and ranks == {str(rank.rank)} and sizes == {str(rank.world_size)}
