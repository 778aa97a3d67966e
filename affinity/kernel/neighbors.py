"""Processes of this host that other plans have bound: a plan warns where it takes their PUs, or avoids them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from affinity.errors import InputError
from affinity.kernel.bound_plan import PLAN_VARIABLE
from affinity.kernel.running import planned_pids, planned_worker_of, variables_of
from affinity.planner.plan import Plan, Request
from affinity.planner.this_machine import plan_this_machine
from affinity.topology.cpuset import format_list
from affinity.wording import first_named

# Equal for the ranks of a job on a host, and for the processes that they start. All plans in memory have the same
# path, and two jobs may be bound by the same plan, but only ranks of one job share a rendezvous address.
JOB_VARIABLES = (PLAN_VARIABLE, "MASTER_ADDR", "MASTER_PORT")
NOT_SHARED = "{share=true} looks at the processes of this host only: remove it for another machine or several hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbor:
    """A process that another plan has bound, and its PUs."""

    pid: int
    pus: tuple[int, ...]


def plan_beside(request: Request, env: Mapping[str, str], command: tuple[str, ...] = (), *, share: bool) -> Plan:
    """Plan this host. With `share` other plans' running processes keep their cores; without, a plan that takes them
    warns. `env` is this process's environment. Raises InputError where the request does not fit, or no core is left."""
    neighbors = find_neighbors(env)
    if share:
        occupied = tuple(sorted({pu for neighbor in neighbors for pu in neighbor.pus}))
        return plan_this_machine(replace(request, occupied=occupied), env, command)
    plan = plan_this_machine(request, env, command)
    return replace(plan, warnings=plan.warnings + contention(plan, neighbors))


def find_neighbors(env: Mapping[str, str]) -> tuple[Neighbor, ...]:
    """The processes of this user (of all users, for root) that other plans have bound, ascending by pid; `env` is
    this process's own environment: processes of its own plan do not count."""
    own, found = _job(env), []
    for pid in planned_pids():
        try:
            variables, mask = variables_of(pid), tuple(sorted(os.sched_getaffinity(pid)))
        except OSError:
            continue  # it has ended
        try:
            worker = planned_worker_of(pid, variables)
        except InputError:  # the plan of another version, say
            worker = None
        pus = worker.pus if worker else mask
        if PLAN_VARIABLE not in env or _job(variables) != own:
            found.append(Neighbor(pid=pid, pus=pus))
    return tuple(found)


def _job(variables: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(variables.get(name) for name in JOB_VARIABLES)


def contention(plan: Plan, neighbors: tuple[Neighbor, ...]) -> tuple[str, ...]:
    """A warning that names the neighbors on the plan's cores, their PUs, and the setting in braces that avoids them; ()
    where there are none."""
    used = {pu for worker in plan.workers for pu in worker.pus}
    cores = {pu for core in plan.machine.cores if not used.isdisjoint(core.pus) for pu in core.pus}
    found = [neighbor for neighbor in neighbors if not cores.isdisjoint(neighbor.pus)]
    if not found:
        return ()
    named = first_named([f"{neighbor.pid} (CPUs {format_list(neighbor.pus)})" for neighbor in found])
    return (
        f"cores of this plan are in use by processes {named}, which another plan has bound: {{share=true}} avoids them",
    )
