"""The cores of a host that a plan may use: those that are requested, not those of other plans' processes, nor more than
the CPU quota feeds."""

from dataclasses import dataclass, replace

from affinity.errors import RequestError
from affinity.planner.core_groups import uniform_groups
from affinity.planner.reasons import SET, Reason, Unused
from affinity.planner.request import Request
from affinity.topology.cpuset import format_list
from affinity.topology.machine import Core, Machine, narrowed


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableCores:
    """The machine narrowed to the usable cores, and what was left out and why."""

    machine: Machine
    unused: tuple[Unused, ...] = ()
    reasons: tuple[Reason, ...] = ()
    warnings: tuple[str, ...] = ()


def usable_cores(machine: Machine, request: Request) -> UsableCores:
    """The requested cores, outside occupied PUs, that the CPU quota feeds. Raises RequestError where none is left."""
    found = UsableCores(machine=machine)
    for narrow in (_listed, _without_isolated, _fastest, _without_occupied, _within_quota):
        step = narrow(found.machine, request)
        found = UsableCores(
            machine=step.machine,
            unused=step.unused + found.unused,
            reasons=found.reasons + step.reasons,
            warnings=found.warnings + step.warnings,
        )
    return found


def _listed(machine: Machine, request: Request) -> UsableCores:
    """Leave out the PUs that are not in the requested list."""
    if not request.cores:
        return UsableCores(machine=machine)
    listed = format_list(request.cores)
    if missing := set(request.cores) - set(machine.allowed_pus):
        raise RequestError(
            f"{{cores={listed}}}: host {machine.name} has no CPU {format_list(missing)} for this process: give CPUs of "
            f"{format_list(machine.allowed_pus)}"
        )
    pus = frozenset(request.cores)
    return UsableCores(
        machine=narrowed(machine, pus, None),
        unused=(
            Unused(
                pus=tuple(pu for pu in machine.allowed_pus if pu not in pus), why=f"{{cores={listed}}} leaves them out"
            ),
        ),
        reasons=(Reason(what="CPUs used", value=listed, why=SET),),
    )


def _without_isolated(machine: Machine, request: Request) -> UsableCores:
    """Leave out isolated PUs, unless they are requested, or there are no others. Between those that stay the scheduler
    moves no thread: each has to be bound to one."""
    isolated = tuple(pu for pu in machine.allowed_pus if pu in frozenset(machine.isolated_pus))
    others = tuple(pu for pu in machine.allowed_pus if pu not in isolated)
    if not isolated:
        return UsableCores(machine=machine)
    listed = format_list(isolated)
    if request.cores or not others:
        bound = (
            f"CPUs {listed} are isolated (isolcpus): the scheduler moves no thread between them, so that each OpenMP, "
            "loader and comm thread is bound to one; what else a program starts stays on one CPU"
        )
        return UsableCores(machine=machine, warnings=(bound,))
    return UsableCores(
        machine=narrowed(machine, frozenset(others), None),
        unused=(Unused(pus=isolated, why=f"isolated (isolcpus): {{cores={listed}}} plans them"),),
        reasons=(
            Reason(
                what="CPUs used",
                value=format_list(others),
                why="the others are isolated (isolcpus): the scheduler moves no thread between them",
            ),
        ),
        warnings=(
            f"CPUs {listed} are isolated (isolcpus) and left out: {{cores={listed}}} plans them, each thread on one",
        ),
    )


def _fastest(machine: Machine, request: Request) -> UsableCores:
    """Leave out the slower types of cores, where that is requested."""
    cores = machine.allowed_cores
    fastest = tuple(core for core in cores if core.speed == max(core.speed for core in cores))
    if request.e_cores == "auto" or fastest == cores:
        return UsableCores(machine=machine)
    return _narrowed(machine, fastest, "{e_cores=off}", unused_why="slower cores: {e_cores=off} leaves them out")


def _without_occupied(machine: Machine, request: Request) -> UsableCores:
    """Leave out the cores of occupied PUs."""
    if not request.occupied:
        return UsableCores(machine=machine)
    cores = machine.allowed_cores
    busy = {pu for core in machine.cores if not {*core.pus}.isdisjoint(request.occupied) for pu in core.pus}
    kept = tuple(core for core in cores if busy.isdisjoint(core.pus))
    if not kept:
        raise RequestError(
            f"{{share=true}}: processes of other plans use all {len(cores)} cores that this process may use on host "
            f"{machine.name}: wait until they end, or plan without {{share}}"
        )
    why = "running processes of other plans are bound to the others ({share=true})"
    return _narrowed(machine, kept, why, unused_why="on cores of processes that other plans have bound")


def _within_quota(machine: Machine, request: Request) -> UsableCores:
    """Leave out the PUs beyond the control groups' quota of CPU time: as many remain as may run all the time.

    Whole cores with `smt`, else one PU of each core, so that no second thread takes time from a compute core's.
    """
    cores, quota = machine.allowed_cores, machine.cpu_quota
    running = len(machine.allowed_pus) if quota is None else max(1, int(quota))
    if quota is None or running >= len(machine.allowed_pus):
        return UsableCores(machine=machine)
    each = min(running, max(len(core.pus) for core in cores)) if request.smt else 1
    best = _kept(machine, cores, running // each)
    kept = tuple(replace(core, pus=core.pus[:each]) for core in best)
    effect = "with more threads, all would be throttled" if quota >= 1 else "even a single thread is throttled"
    why = f"the control group's quota is the time of {quota:g} CPUs: {effect}"
    step = _narrowed(machine, kept, why, unused_why="beyond the CPU quota")
    second = tuple(sorted(pu for core in best for pu in core.pus[each:]))
    beyond = Unused(pus=tuple(pu for pu in step.unused[0].pus if pu not in second), why=step.unused[0].why)
    others = Unused(pus=second, why="further threads of their cores: the CPU quota does not feed all threads")
    return replace(step, unused=tuple(item for item in (beyond, others) if item.pus))


def _kept(machine: Machine, cores: tuple[Core, ...], count: int) -> tuple[Core, ...]:
    """The `count` best cores, in as few NUMA nodes as possible: those next to memory that the process may use, fast
    ones, of one node that has enough of them, next to much memory."""
    memory = {
        cpus: sum(
            node.memory_bytes
            for node in machine.numa_nodes
            if cpus in node.near and node.id in machine.allowed_nodes and (node.pus or node.kind in ("dram", "hbm"))
        )
        for cpus in {core.numa_node for core in cores}
        if cpus is not None
    }

    def order(group: tuple[Core, ...]) -> tuple[float, ...]:
        here = memory.get(group[0].numa_node, 0) if group[0].numa_node is not None else 0
        return (here == 0, -group[0].speed, -min(len(group), count), -here)

    best = [core for group in sorted(uniform_groups(cores), key=order) for core in group][:count]
    return tuple(core for core in cores if core in best)


def _narrowed(machine: Machine, kept: tuple[Core, ...], why: str, *, unused_why: str) -> UsableCores:
    pus = frozenset(pu for core in kept for pu in core.pus)
    return UsableCores(
        machine=narrowed(machine, pus, None),
        unused=(Unused(pus=tuple(pu for pu in machine.allowed_pus if pu not in pus), why=unused_why),),
        reasons=(Reason(what="cores used", value=f"{len(kept)} of {len(machine.allowed_cores)}", why=why),),
    )
