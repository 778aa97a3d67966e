"""The cores of a host that a plan may use: not those of other plans' processes, nor more than the CPU quota feeds."""

from dataclasses import dataclass

from affinity.errors import RequestError
from affinity.planner.reasons import Reason, Unused
from affinity.topology.machine import Core, Machine, narrowed


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableCores:
    """The machine narrowed to the usable cores, and what was left out and why."""

    machine: Machine
    unused: tuple[Unused, ...] = ()
    reasons: tuple[Reason, ...] = ()


def usable_cores(machine: Machine, taken: tuple[int, ...]) -> UsableCores:
    """The cores outside `taken` PUs that the CPU quota feeds. Raises RequestError where none is left."""
    free = _without_taken(machine, taken)
    fed = _within_quota(free.machine)
    return UsableCores(machine=fed.machine, unused=fed.unused + free.unused, reasons=free.reasons + fed.reasons)


def _without_taken(machine: Machine, taken: tuple[int, ...]) -> UsableCores:
    """Leave out the cores of taken PUs."""
    if not taken:
        return UsableCores(machine=machine)
    cores = machine.allowed_cores
    busy = {pu for core in machine.cores if not {*core.pus}.isdisjoint(taken) for pu in core.pus}
    kept = tuple(core for core in cores if busy.isdisjoint(core.pus))
    if not kept:
        raise RequestError(
            f"{{share=true}}: processes of other plans use all {len(cores)} cores that this process may use on host "
            f"{machine.name}: wait until they end, or plan without {{share}}"
        )
    why = "running processes of other plans are bound to the others (share)"
    return _narrowed(machine, kept, why, unused_why="on cores of processes that other plans have bound")


def _within_quota(machine: Machine) -> UsableCores:
    """Leave out the cores beyond the control groups' quota of CPU time."""
    cores, quota = machine.allowed_cores, machine.cpu_quota
    if quota is None or max(1, int(quota)) >= len(cores):
        return UsableCores(machine=machine)
    why = f"the control group's quota is {quota:g} cores' worth of CPU time: with more threads, all would be throttled"
    return _narrowed(machine, cores[: max(1, int(quota))], why, unused_why="beyond the CPU quota")


def _narrowed(machine: Machine, kept: tuple[Core, ...], why: str, *, unused_why: str) -> UsableCores:
    pus = frozenset(pu for core in kept for pu in core.pus)
    return UsableCores(
        machine=narrowed(machine, pus, None),
        unused=(Unused(pus=tuple(pu for pu in machine.allowed_pus if pu not in pus), why=unused_why),),
        reasons=(Reason(what="cores used", value=f"{len(kept)} of {len(machine.allowed_cores)}", why=why),),
    )
