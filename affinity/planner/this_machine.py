"""Plan the machine that this process runs on."""

from collections.abc import Mapping

from affinity.planner.defaults import with_defaults
from affinity.planner.plan import Plan, Request, plan_machine
from affinity.planner.records import read_measured
from affinity.planner.runtime import find_runtime, installed_allocators, target_of
from affinity.topology.machine import Machine
from affinity.topology.sysfs import this_machine


def plan_this_machine(
    request: Request, env: Mapping[str, str], command: tuple[str, ...] = (), *, machine: Machine | None = None
) -> Plan:
    """Read this machine (or take it as already read) and plan it. Raises InputError where the request does not fit.

    The OpenMP runtime and the allocator are those of the Python that `command` starts; (): of this Python. What
    `cputrain bench` and `tune` have measured on this machine is used.
    """
    machine = machine or this_machine()
    measured = read_measured(machine, request, env)
    target, allocator = target_of(command), request.allocator
    tuned = with_defaults(machine, request, measured)[0].allocator
    if tuned in installed_allocators(target):
        allocator = tuned
    runtime = find_runtime(target, env, openmp=request.openmp, allocator=allocator)
    return plan_machine(machine, request, runtime, measured)
