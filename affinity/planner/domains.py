"""A host's cores -> one domain per worker, along its NUMA nodes, dies, caches and core types."""

from collections.abc import Callable
from dataclasses import dataclass

from affinity.errors import RequestError
from affinity.planner.core_groups import Cores, cores_by, memory_places, uniform_groups
from affinity.planner.layouts import NEARLY, Layout, best_layout, shares
from affinity.planner.reasons import SET, Reason, Unused
from affinity.planner.worker_count import choose_layout
from affinity.topology.machine import Machine
from affinity.wording import spread

OTHER_TYPE = "slower or faster than the compute cores: mixed, all would run at the slowest cores' speed"
MOST_TRIED = 16  # numbers of workers below the requested one
TOO_FEW = "too few in their NUMA node: a worker there would slow down all others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """One worker's cores: `cores` of one type, which may compute, and `spare` ones, which load and communicate."""

    cores: Cores
    spare: Cores = ()

    @property
    def capacity(self) -> float:
        """How much it computes, in cores of the fastest type."""
        return sum(core.speed for core in self.cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The domains by local rank, why they are as they are, and what could not be avoided.

    `unused` are the PUs of cores in NUMA nodes where no worker computes.
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
    most: int | None = None,
    proportional: bool,
    headroom: Callable[[tuple[Domain, ...]], float],
) -> Partition:
    """Divide the allowed cores into ppn domains; None lets the rules decide how many,
    `most` at the most.

    With at least as many workers as NUMA nodes no domain crosses a node. Domains have cores of one type. Cores whose
    worker all others would wait for are left out. `proportional`: workers get batches in proportion to their cores, so
    a small domain delays no other. `headroom`: the least ratio of a worker's memory to what it needs. Raises
    RequestError where ppn exceeds the allowed cores.
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
        chosen = choose_layout(cores, most, room, proportional=proportional)
        layout, ppn_why = chosen.layout, chosen.why
    else:
        layout = best_layout(cores, ppn, room, proportional=proportional)
    faster = None if ppn is None or proportional else _faster(cores, layout, room)
    domains = domains_of(cores, layout)
    return Partition(
        domains=domains,
        unused=tuple(_left_out(cores, domains)),
        reasons=(
            Reason(what="workers per host", value=str(len(domains)), why=ppn_why),
            *_core_type_reasons(cores, layout.used, proportional=proportional),
            *_cache_reasons(layout),
        ),
        warnings=tuple(_warnings(layout, faster, proportional=proportional)),
    )


def domains_of(cores: Cores, layout: Layout) -> tuple[Domain, ...]:
    """The domains of a layout: the other cores of each NUMA node are divided among the workers that compute there."""
    busy = {pu for core in layout.used for pu in core.pus}
    idle = tuple(core for core in cores if busy.isdisjoint(core.pus))
    given: list[Cores] = [()] * len(layout.parts)
    for node in {core.numa_node for core in idle}:
        here = [i for i, part in enumerate(layout.parts) if any(core.numa_node == node for core in part)]
        divided = shares(tuple(core for core in idle if core.numa_node == node), len(here)) if here else []
        for i, part in zip(here, divided, strict=True):
            given[i] += part
    return tuple(Domain(cores=part, spare=spare) for part, spare in zip(layout.parts, given, strict=True))


def _left_out(cores: Cores, domains: tuple[Domain, ...]) -> list[Unused]:
    """The PUs in no domain, and why."""
    assigned = {pu for domain in domains for core in (*domain.cores, *domain.spare) for pu in core.pus}
    idle = [core for core in cores if assigned.isdisjoint(core.pus)]
    computing = {core.speed for domain in domains for core in domain.cores}
    return [Unused(pus=core.pus, why=TOO_FEW if core.speed in computing else OTHER_TYPE) for core in idle]


def _core_type_reasons(cores: Cores, used: Cores, *, proportional: bool) -> list[Reason]:
    """Which core types compute, where there are several."""
    speeds = sorted({core.speed for core in cores}, reverse=True)
    if len(speeds) == 1:
        return []
    counts = ", ".join(f"{sum(core.speed == s for core in cores)} of speed {s:.2f}" for s in speeds)
    if len({core.speed for core in used}) == 1:
        why = (
            f"only those of speed {used[0].speed:.2f} compute: a worker has cores of one type, as its threads wait for "
            "the slowest, and a step waits for the slowest worker; the others may load and communicate"
        )
    else:
        how = (
            "each worker's batch is in proportion to its cores" if proportional else "the slowest worker sets the pace"
        )
        why = f"each worker has cores of one type; {how}"
    return [Reason(what="core types", value=counts, why=why)]


def _cache_reasons(layout: Layout) -> list[Reason]:
    """How many level-3 caches a worker has, where a NUMA node has several."""
    several = any(len(cores_by("l3", group)) > 1 for group in uniform_groups(layout.used))
    if not several or any(core.l3 is None for core in layout.used):
        return []
    caches = [{core.l3 for core in part} for part in layout.parts]
    every = set().union(*caches)
    types = [{core.speed for core in layout.used if core.l3 == cache} for cache in every]
    workers = {cache: sum(cache in used for used in caches) for cache in every}
    shared = sum(count > 1 for count in workers.values())
    value = spread([len(used) for used in caches])
    if not shared:
        why = "whole caches: workers do not evict each other's weights"
    elif len(set(workers.values())) == 1 and all(len(used) == 1 for used in caches):
        why = f"{len(caches)} workers share {len(every)} caches, equally many each"
    elif any(len(speeds) > 1 for speeds in types):
        why = f"workers share {shared} of {len(every)} caches: each worker has cores of one type, a cache several"
    else:
        why = f"workers share {shared} of {len(every)} caches, so that their numbers of cores are as equal as possible"
    return [Reason(what="level-3 caches per worker", value=value, why=why)]


def _faster(cores: Cores, layout: Layout, headroom: Callable[[Layout], float]) -> Layout | None:
    """Of workers with unequal domains: the layout of somewhat fewer ones that clearly computes more, if any."""
    if max(layout.sizes) == min(layout.sizes):
        return None
    count, pace = len(layout.parts), layout.pace(proportional=False)
    numbers = range(count - 1, max(count // 2, count - MOST_TRIED - 1), -1)
    fewer = (best_layout(cores, ppn, headroom, proportional=False) for ppn in numbers)
    return next((one for one in fewer if NEARLY * one.pace(proportional=False) > pace and headroom(one) >= 1), None)


def _described(faster: Layout | None, layout: Layout) -> str:
    if faster is None:
        return ""
    times = faster.pace(proportional=False) / layout.pace(proportional=False)
    return f"; {{ppn={len(faster.parts)}}} computes {times:.1f} times as much"


def _warnings(layout: Layout, faster: Layout | None, *, proportional: bool) -> list[str]:
    found = []
    if layout.across:
        places = memory_places(layout.used)
        if len(layout.parts) == 1:
            found.append(f"the worker spans {places}: part of its memory is remote")
        else:
            workers = f"{layout.across} of {len(layout.parts)} workers"
            found.append(f"{workers} span several of the {places}: part of their memory is remote")
    one_type = len({core.speed for core in layout.used}) == 1
    if max(layout.sizes) > min(layout.sizes) and one_type and not proportional:
        found.append(
            f"domains of {spread(layout.sizes, 'core')}: the smallest sets the pace of each step "
            f"({{balance=batch}} makes batches proportional to cores{_described(faster, layout)})"
        )
    return found
