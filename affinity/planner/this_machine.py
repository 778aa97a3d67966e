"""Plan the machine that this process runs on."""

from collections.abc import Mapping

from affinity.planner.plan import Plan, Request, plan_machine
from affinity.planner.runtime import find_runtime, target_of
from affinity.topology.machine import Machine
from affinity.topology.sysfs import this_machine


def plan_this_machine(
    request: Request, env: Mapping[str, str], command: tuple[str, ...] = (), *, machine: Machine | None = None
) -> Plan:
    """Read this machine (or take it as already read) and plan it. Raises InputError where the request does not fit.

    The OpenMP runtime and the allocator are those of the Python that `command` starts; (): of this Python.
    """
    runtime = find_runtime(target_of(command), env, openmp=request.openmp)
    return plan_machine(machine or this_machine(), request, runtime)
