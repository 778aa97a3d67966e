"""The cores (domain) of each worker of a host.

Usable cores are the requested ones, without cores in use by other plans' processes, limited by the CPU quota. They are
divided by the chosen layout (layouts.py). With more workers than cores, workers share cores.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from cputrain.affinity.errors import RequestError
from cputrain.affinity.planner.layouts import (
    AMX,
    EQUALLY_FAST,
    Cores,
    Layout,
    best_layout,
    choose_layout,
    cores_by,
    divide_evenly,
    memory_places,
    uniform_groups,
)
from cputrain.affinity.planner.request import SET, WORKERS_PER_HOST, Reason, Request, Unused
from cputrain.affinity.topology.machine import Core, Machine, format_list, narrow_machine
from cputrain.affinity.wording import numbers_text, plural, spread

OTHER_TYPE = "another core type than the compute cores; a mixed worker would run at the slowest core's speed"
MAX_FEWER_WORKERS = 16  # numbers of workers below the requested one
TOO_FEW = "too few cores in their NUMA node; a worker there would slow down all others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """One worker's cores: `cores`, which compute unless reserved, and `spare` cores that only load or communicate."""

    cores: Cores
    spare: Cores = ()

    @property
    def capacity(self) -> float:
        """Throughput in cores of the fastest type; all cores run at the pace of the slowest."""
        return len(self.cores) * min(core.speed for core in self.cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The domains by local rank, with reasons and warnings.

    `unused` are the PUs of cores in no domain.
    """

    domains: tuple[Domain, ...]
    unused: tuple[Unused, ...]
    reasons: tuple[Reason, ...]
    warnings: tuple[str, ...]


def partition_host(
    machine: Machine,
    ppn: int | None,
    *,
    ppn_why: str = SET,
    max_workers: int | None = None,
    proportional: bool,
    headroom: Callable[[tuple[Domain, ...]], float],
) -> Partition:
    """Divide the allowed cores into ppn domains; None lets the rules choose the number, at most `max_workers`.

    With at least as many workers as NUMA nodes, no domain crosses a node. Domains have cores of one type, unless there
    are fewer than groups of equal cores and a mixed one is clearly faster. Cores whose
    worker would delay all others are left out. `proportional`: batches are proportional to the workers' cores, so that
    a small domain delays no other. `headroom`: smallest ratio of a worker's memory to its need. Raises RequestError if
    ppn exceeds the allowed cores.
    """
    cores = machine.allowed_cores
    if ppn is not None and ppn > len(cores):
        raise RequestError(
            f"{{ppn={ppn}}} needs {ppn} cores; host {machine.name} has {len(cores)} available: set {{ppn}} to "
            f"{len(cores)} or fewer, or let workers share cores with {{oversubscribe=true}}"
        )

    def room(layout: Layout) -> float:
        return headroom(domains_of(cores, layout))

    if ppn is None:
        layout, ppn_why = choose_layout(cores, max_workers, room, proportional=proportional, amx=AMX in machine.isa)
    else:
        layout = best_layout(cores, ppn, room, proportional=proportional)
    faster = None if ppn is None or proportional else _faster_layout(cores, layout, room)
    domains = domains_of(cores, layout)
    return Partition(
        domains=domains,
        unused=tuple(_unused(cores, domains)),
        reasons=(
            Reason(what=WORKERS_PER_HOST, value=numbers_text("{workers}", workers=len(domains)), why=ppn_why),
            *_core_type_reasons(cores, layout, proportional=proportional),
            *_cache_reasons(layout),
        ),
        warnings=tuple(_warnings(layout, faster, proportional=proportional)),
    )


def domains_of(cores: Cores, layout: Layout) -> tuple[Domain, ...]:
    """Return the domains of a layout; the remaining cores of each NUMA node become spare cores of its workers."""
    busy = {pu for core in layout.used for pu in core.pus}
    idle = tuple(core for core in cores if busy.isdisjoint(core.pus))
    spares: list[Cores] = [()] * len(layout.parts)
    for node in {core.numa_node for core in idle}:
        workers = [i for i, part in enumerate(layout.parts) if any(core.numa_node == node for core in part)]
        divided = divide_evenly(tuple(core for core in idle if core.numa_node == node), len(workers)) if workers else []
        for i, part in zip(workers, divided, strict=True):
            spares[i] += part
    return tuple(Domain(cores=part, spare=spare) for part, spare in zip(layout.parts, spares, strict=True))


def _unused(cores: Cores, domains: tuple[Domain, ...]) -> list[Unused]:
    """List the PUs in no domain, with the reason."""
    assigned = {pu for domain in domains for core in (*domain.cores, *domain.spare) for pu in core.pus}
    idle = [core for core in cores if assigned.isdisjoint(core.pus)]
    computing = {core.speed for domain in domains for core in domain.cores}
    return [Unused(pus=core.pus, why=TOO_FEW if core.speed in computing else OTHER_TYPE) for core in idle]


def _core_type_reasons(cores: Cores, layout: Layout, *, proportional: bool) -> list[Reason]:
    """Explain which core types compute, if there are several."""
    speeds, used = sorted({core.speed for core in cores}, reverse=True), layout.used
    if len(speeds) == 1:
        return []
    counts = ", ".join(f"{sum(core.speed == s for core in cores)} of speed {s:.2f}" for s in speeds)
    if len({core.speed for core in used}) == 1:
        why = (
            "only cores of speed {speed:.2f} compute, as threads wait for the slowest core of their worker, and a step "
            "for the slowest worker; the other cores may load images and communicate"
        )
    elif layout.mixed:
        why = (
            "a worker computes on several types at the pace of the slowest, which is faster than one type alone; with "
            "more workers each has cores of one type"
        )
    else:
        how = (
            "each worker's batch is in proportion to its cores" if proportional else "the slowest worker sets the pace"
        )
        why = f"each worker has cores of one type; {how}"
    return [Reason(what="core types", value=counts, why=numbers_text(why, speed=used[0].speed))]


def _cache_reasons(layout: Layout) -> list[Reason]:
    """Explain the number of level-3 caches per worker, if a NUMA node has several."""
    several = any(len(cores_by("l3", group)) > 1 for group in uniform_groups(layout.used))
    if not several or any(core.l3 is None for core in layout.used):
        return []
    caches = [{core.l3 for core in part} for part in layout.parts]
    every = set().union(*caches)
    types = [{core.speed for core in layout.used if core.l3 == cache} for cache in every]
    workers = {cache: sum(cache in used for used in caches) for cache in every}
    shared = sum(count > 1 for count in workers.values())
    if not shared:
        why = "whole caches, so that workers do not evict each other's weights"
    elif len(set(workers.values())) == 1 and all(len(used) == 1 for used in caches):
        why = "{workers} workers share {caches} caches, equally many each"
    elif any(len(speeds) > 1 for speeds in types):
        why = "workers share {shared} of {caches} caches, as workers have cores of one type, caches several types"
    else:
        why = "workers share {shared} of {caches} caches, so that workers are as equal as possible"
    return [
        Reason(
            what="level-3 caches per worker",
            value=numbers_text("{each}", each=tuple(map(len, caches))),
            why=numbers_text(why, workers=len(caches), shared=shared, caches=len(every)),
        )
    ]


def _faster_layout(cores: Cores, layout: Layout, headroom: Callable[[Layout], float]) -> Layout | None:
    """Find a clearly faster layout with somewhat fewer workers, if the domains are unequal."""
    if max(layout.sizes) == min(layout.sizes):
        return None
    count, throughput = len(layout.parts), layout.throughput(proportional=False)
    numbers = range(count - 1, max(count // 2, count - MAX_FEWER_WORKERS - 1), -1)
    fewer = (best_layout(cores, ppn, headroom, proportional=False) for ppn in numbers)
    return next(
        (
            candidate
            for candidate in fewer
            if EQUALLY_FAST * candidate.throughput(proportional=False) > throughput and headroom(candidate) >= 1
        ),
        None,
    )


def _hint_at(faster: Layout | None, layout: Layout) -> str:
    if faster is None:
        return ""
    times = faster.throughput(proportional=False) / layout.throughput(proportional=False)
    return f"; {{ppn={len(faster.parts)}}} computes {times:.1f} times as much"


def _warnings(layout: Layout, faster: Layout | None, *, proportional: bool) -> list[str]:
    warnings = []
    if layout.across:
        memories = memory_places(layout.used)
        if len(layout.parts) == 1:
            warnings.append(f"the worker spans {memories.text}: part of its memory is remote")
        else:
            workers = f"{layout.across} of {len(layout.parts)} workers"
            warnings.append(f"{workers} span several of the {memories.text}: part of their memory is remote")
    one_type = len({core.speed for core in layout.used}) == 1
    if max(layout.sizes) > min(layout.sizes) and one_type and not proportional:
        warnings.append(
            f"domains of {spread(layout.sizes, 'core')}: the smallest sets the pace of each step "
            f"({{balance=batch}} makes batches proportional to cores{_hint_at(faster, layout)})"
        )
    return warnings


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableCores:
    """The machine restricted to its usable cores, and the unused PUs with reasons."""

    machine: Machine
    unused: tuple[Unused, ...] = ()
    reasons: tuple[Reason, ...] = ()
    warnings: tuple[str, ...] = ()


def usable_cores(machine: Machine, request: Request) -> UsableCores:
    """Restrict the machine to the requested, unoccupied cores within the CPU quota.

    Raises RequestError if no core is left.
    """
    usable = UsableCores(machine=machine)
    for narrow in (_requested, _without_isolated, _fastest, _without_occupied, _within_quota):
        step = narrow(usable.machine, request)
        usable = UsableCores(
            machine=step.machine,
            unused=step.unused + usable.unused,
            reasons=usable.reasons + step.reasons,
            warnings=usable.warnings + step.warnings,
        )
    return usable


def _requested(machine: Machine, request: Request) -> UsableCores:
    """Keep only the PUs in the requested list."""
    if not request.cores:
        return UsableCores(machine=machine)
    listed = format_list(request.cores)
    if missing := set(request.cores) - set(machine.allowed_pus):
        raise RequestError(
            f"{{cores={listed}}}: CPUs {format_list(missing)} of host {machine.name} are not available to this "
            f"process; choose from {format_list(machine.allowed_pus)}"
        )
    used = Reason(what="CPUs used", value=listed, why=SET)
    return _only(machine, request.cores, used, unused_why=f"{{cores={listed}}} leaves them out")


def _without_isolated(machine: Machine, request: Request) -> UsableCores:
    """Leave out isolated PUs, unless they are requested or there are no others.

    The scheduler does not move threads between isolated PUs, so that each thread has to be bound to one.
    """
    isolated = tuple(pu for pu in machine.allowed_pus if pu in frozenset(machine.isolated_pus))
    scheduled = tuple(pu for pu in machine.allowed_pus if pu not in isolated)
    if not isolated:
        return UsableCores(machine=machine)
    listed = format_list(isolated)
    if request.cores or not scheduled:
        bound = (
            f"CPUs {listed} are isolated (isolcpus): the scheduler moves no thread between them, so each OpenMP, "
            "loader and comm thread is bound to one CPU; all other threads of the program stay on a single CPU"
        )
        return UsableCores(machine=machine, warnings=(bound,))
    why = "the others are isolated (isolcpus), and the scheduler moves no thread between them"
    used = Reason(what="CPUs used", value=format_list(scheduled), why=why)
    warning = f"CPUs {listed} are isolated (isolcpus) and left out: {{cores={listed}}} uses them, with a thread on each"
    usable = _only(machine, scheduled, used, unused_why=f"isolated (isolcpus); {{cores={listed}}} uses them")
    return replace(usable, warnings=(warning,))


def _fastest(machine: Machine, request: Request) -> UsableCores:
    """Leave out the slower types of cores if requested."""
    cores = machine.allowed_cores
    highest = max((core.speed for core in cores), default=1.0)
    fastest = tuple(core for core in cores if core.speed == highest)
    if request.e_cores == "auto" or fastest == cores:
        return UsableCores(machine=machine)
    return _narrowed(machine, fastest, "{e_cores=off}", unused_why="slower cores, left out by {e_cores=off}")


def _without_occupied(machine: Machine, request: Request) -> UsableCores:
    """Leave out the cores of occupied PUs."""
    if not request.occupied:
        return UsableCores(machine=machine)
    cores = machine.allowed_cores
    busy = {pu for core in machine.cores if not {*core.pus}.isdisjoint(request.occupied) for pu in core.pus}
    free = tuple(core for core in cores if busy.isdisjoint(core.pus))
    if not free:
        raise RequestError(
            f"{{share=true}}: processes of other plans use all {plural(len(cores), 'core')} available to this process "
            f"on host {machine.name}; wait until they end, or plan without {{share}}"
        )
    why = "the others are in use by processes of other plans ({share=true})"
    return _narrowed(machine, free, why, unused_why="on cores in use by processes of other plans")


def _within_quota(machine: Machine, request: Request) -> UsableCores:
    """Keep as many PUs as the control groups' CPU quota lets run all the time.

    Whole cores with `smt`, else one PU per core, so that no hyper-thread takes CPU time from compute threads.
    """
    cores, quota = machine.allowed_cores, machine.cpu_quota
    running = len(machine.allowed_pus) if quota is None else max(1, int(quota))
    if quota is None or running >= len(machine.allowed_pus):
        return UsableCores(machine=machine)
    pus_per_core = min(running, max(len(core.pus) for core in cores)) if request.smt else 1
    best = _best_cores(machine, cores, running // pus_per_core)
    cut = tuple(replace(core, pus=core.pus[:pus_per_core]) for core in best)
    effect = "more threads would all be throttled" if quota >= 1 else "even a single thread is throttled"
    why = numbers_text(
        "the control group's quota is the time of {quota:g} CPUs, and {effect}", quota=quota, effect=effect
    )
    step = _narrowed(machine, cut, why, unused_why="beyond the CPU quota")
    second = tuple(sorted(pu for core in best for pu in core.pus[pus_per_core:]))
    beyond = Unused(pus=tuple(pu for pu in step.unused[0].pus if pu not in second), why=step.unused[0].why)
    siblings = Unused(pus=second, why="hyper-threads of used cores; the CPU quota is too small for all threads")
    return replace(step, unused=tuple(item for item in (beyond, siblings) if item.pus))


def _best_cores(machine: Machine, cores: tuple[Core, ...], count: int) -> tuple[Core, ...]:
    """Choose the `count` best cores, in as few NUMA nodes as possible.

    Nodes are ordered by: allowed memory, speed of the cores, enough cores, size of the memory.
    """
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
        allowed_bytes = memory.get(group[0].numa_node, 0) if group[0].numa_node is not None else 0
        return (allowed_bytes == 0, -group[0].speed, -min(len(group), count), -allowed_bytes)

    best = [core for group in sorted(uniform_groups(cores), key=order) for core in group][:count]
    return tuple(core for core in cores if core in best)


def _narrowed(machine: Machine, remaining: tuple[Core, ...], why: str, *, unused_why: str) -> UsableCores:
    value = numbers_text("{used} of {allowed}", used=len(remaining), allowed=len(machine.allowed_cores))
    used = Reason(what="cores used", value=value, why=why)
    return _only(machine, (pu for core in remaining for pu in core.pus), used, unused_why=unused_why)


def _only(machine: Machine, pus: Iterable[int], used: Reason, *, unused_why: str) -> UsableCores:
    """Keep these allowed PUs; `used` explains them, `unused_why` the others."""
    remaining = frozenset(pus)
    unused = Unused(pus=tuple(pu for pu in machine.allowed_pus if pu not in remaining), why=unused_why)
    return UsableCores(machine=narrow_machine(machine, remaining), unused=(unused,), reasons=(used,))


def partition_shared(machine: Machine, ppn: int) -> Partition:
    """Give each of more workers than cores one core; the numbers of workers per core differ by at most one.

    Workers on the same core divide its PUs before two of them share a PU.
    """
    cores = machine.allowed_cores
    domains = tuple(
        Domain(cores=(part,))
        for core, workers in zip(cores, divide_evenly(tuple(range(ppn)), len(cores)), strict=True)
        for part in _parts(core, len(workers))
    )
    max_per_core = -(-ppn // len(cores))
    why = numbers_text("{set}, more than the {cores:core} ({{oversubscribe=true}})", set=SET, cores=len(cores))
    return Partition(
        domains=domains,
        unused=(),
        reasons=(Reason(what=WORKERS_PER_HOST, value=numbers_text("{workers}", workers=ppn), why=why),),
        warnings=(
            f"oversubscribed: {ppn} workers share {plural(len(cores), 'core')}, up to {max_per_core} per core, and "
            "slow each other down; use this to test a number of workers, not to measure speed",
        ),
    )


def _parts(core: Core, count: int) -> list[Core]:
    """Return a copy of the core for each of its workers, with that worker's PUs."""
    pus = core.pus
    starts = [i * len(pus) // count for i in range(count)]
    ends = [max(start + 1, (i + 1) * len(pus) // count) for i, start in enumerate(starts)]
    return [replace(core, pus=pus[start:end]) for start, end in zip(starts, ends, strict=True)]
