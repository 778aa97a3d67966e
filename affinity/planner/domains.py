"""A host's cores -> one domain per worker, along its NUMA nodes, dies, caches and core types."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from affinity.errors import RequestError
from affinity.planner.core_groups import Cores, cores_by, uniform_groups
from affinity.planner.reasons import Reason
from affinity.planner.worker_count import why_so_many, workers_in
from affinity.topology.machine import Machine

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """One worker's cores: `cores` of one type, which may compute, and `slow` ones, which only load and communicate."""

    cores: Cores
    slow: Cores = ()

    @property
    def capacity(self) -> float:
        """How much it computes, in cores of the fastest type."""
        return sum(core.speed for core in self.cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The domains by local rank, why they are as they are, and what could not be avoided.

    `unassigned` are slow cores in NUMA nodes where no worker computes.
    """

    domains: tuple[Domain, ...]
    unassigned: Cores
    reasons: tuple[Reason, ...]
    warnings: tuple[str, ...]


def shares(items: tuple[T, ...], count: int) -> list[tuple[T, ...]]:
    """Divide items into `count` consecutive shares whose sizes differ by at most one."""
    bounds = [len(items) * i // count for i in range(count + 1)]
    return [items[a:b] for a, b in pairwise(bounds)]


def partition_host(machine: Machine, ppn: int | None, *, ppn_why: str = "requested", proportional: bool) -> Partition:
    """Divide the allowed cores into ppn domains; None lets the rules decide how many.

    With at least as many workers as NUMA nodes no domain crosses a node: each node gets workers in proportion to its
    cores, at least one. Domains have cores of one type, where ppn leaves that possible. `proportional`: workers get
    batches in proportion to their cores, so a small domain delays no other. Raises RequestError where ppn exceeds the
    allowed cores.
    """
    cores = machine.allowed_cores
    if ppn is not None and ppn > len(cores):
        raise RequestError(
            f"{{ppn={ppn}}} needs {ppn} cores; host {machine.name} has {len(cores)} available: set {{ppn}} to "
            f"{len(cores)} or fewer, or let workers share cores with {{oversubscribe=true}}"
        )
    used = _computing(cores, ppn, proportional=proportional)
    parts = partition_cores(used, ppn)
    busy = {pu for core in used for pu in core.pus}
    slow = tuple(core for core in cores if not busy & {*core.pus})
    domains = _with_slow(tuple(Domain(cores=part) for part in parts), slow)
    assigned = {pu for domain in domains for core in (*domain.cores, *domain.slow) for pu in core.pus}
    why = ppn_why if ppn is not None else why_so_many(used, len(parts))
    return Partition(
        domains=domains,
        unassigned=tuple(core for core in cores if not assigned & {*core.pus}),
        reasons=(
            Reason(what="workers per host", value=str(len(domains)), why=why),
            *_core_type_reasons(cores, used, proportional=proportional),
            *_cache_reasons(used, parts),
        ),
        warnings=tuple(_warnings(used, domains, proportional=proportional)),
    )


def partition_cores(cores: Cores, ppn: int | None) -> list[Cores]:
    """Divide cores into ppn parts (None: as many as suit their groups), across groups only where ppn is smaller."""
    groups = uniform_groups(cores)
    counts = [workers_in(group) for group in groups]
    if ppn is not None and ppn < len(groups):
        if len(groups) % ppn == 0:
            return [tuple(core for group in share for core in group) for share in shares(tuple(groups), ppn)]
        return shares(cores, ppn)
    if ppn is not None:
        counts = [1] * len(groups)
        for _ in range(ppn - len(groups)):
            # Next worker where a worker has most cores; ppn <= cores guarantees that such a group has a core to spare.
            widest = max(range(len(groups)), key=lambda i: (len(groups[i]) / counts[i], -i))
            counts[widest] += 1
    return [part for group, count in zip(groups, counts, strict=True) for part in partition_group(group, count)]


def partition_group(group: Cores, count: int) -> list[Cores]:
    """Divide a group into parts that differ by a core at most: along dies, else level-3 caches, where possible."""
    for level in ("die", "l3"):
        units = cores_by(level, group)
        if len(units) > 1 and len(units) % count == 0:
            parts = [tuple(core for unit in share for core in unit) for share in shares(tuple(units), count)]
        elif len(units) > 1 and count % len(units) == 0:
            parts = [part for unit in units for part in shares(unit, min(count // len(units), len(unit)))]
        else:
            continue
        sizes = [len(part) for part in parts]
        if len(parts) == count and max(sizes) - min(sizes) <= 1:
            return parts
    return shares(group, count)


def _computing(cores: Cores, ppn: int | None, *, proportional: bool) -> Cores:
    """The cores that compute: those of one type or of all types, whichever do most in a step.

    With equal batches every worker takes as long as the slowest; with batches in proportion all take the same time.
    Where ppn suits the cores of no type, all compute as if they were slow: some worker has cores of two types.
    """
    speeds = sorted({core.speed for core in cores}, reverse=True)
    nodes = {core.numa_node for core in cores}

    def fits(used: Cores) -> bool:
        may_span = ppn is not None and ppn < len(nodes) and len({core.speed for core in used}) == 1
        return ppn is None or (ppn <= len(used) and (ppn >= len(uniform_groups(used)) or may_span))

    def done(used: Cores) -> float:
        capacities = [Domain(cores=part).capacity for part in partition_cores(used, ppn)]
        return sum(capacities) if proportional else len(capacities) * min(capacities)

    choices = [tuple(core for core in cores if core.speed == speed) for speed in speeds]
    fitting = [used for used in (*choices, cores) if fits(used)]
    if not fitting:
        return tuple(replace(core, speed=speeds[-1]) for core in cores)
    return max(fitting, key=done)


def _with_slow(domains: tuple[Domain, ...], slow: Cores) -> tuple[Domain, ...]:
    """Divide the slow cores of each NUMA node among the domains that compute there."""
    given: list[Cores] = [()] * len(domains)
    for node in {core.numa_node for core in slow}:
        here = [i for i, domain in enumerate(domains) if any(core.numa_node == node for core in domain.cores)]
        parts = shares(tuple(core for core in slow if core.numa_node == node), len(here)) if here else []
        for i, part in zip(here, parts, strict=True):
            given[i] += part
    return tuple(Domain(cores=domain.cores, slow=part) for domain, part in zip(domains, given, strict=True))


def _core_type_reasons(cores: Cores, used: Cores, *, proportional: bool) -> list[Reason]:
    """Which core types compute, where there are several."""
    speeds = sorted({core.speed for core in cores}, reverse=True)
    if len(speeds) == 1:
        return []
    counts = ", ".join(f"{sum(core.speed == s for core in cores)} of speed {s:.2f}" for s in speeds)
    if len(used) < len(cores):
        why = (
            f"only those of speed {used[0].speed:.2f} compute: a step waits for its slowest core, so all types "
            "together would do less; the others may load and communicate"
        )
    elif len({core.speed for core in used}) > 1:
        how = (
            "each worker's batch is in proportion to its cores" if proportional else "the slowest worker sets the pace"
        )
        why = f"each worker has cores of one type; {how}, and all types together do most"
    else:
        why = "all compute at the pace of the slow ones: with this many workers some have cores of two types"
    return [Reason(what="core types", value=counts, why=why)]


def _cache_reasons(cores: Cores, parts: list[Cores]) -> list[Reason]:
    """How many level-3 caches a worker has, where a NUMA node has several."""
    several = any(len(cores_by("l3", group)) > 1 for group in uniform_groups(cores))
    if not several or any(core.l3 is None for core in cores):
        return []
    users: dict[int | None, set[int]] = {}
    for i, part in enumerate(parts):
        for core in part:
            users.setdefault(core.l3, set()).add(i)
    shared = sum(len(workers) > 1 for workers in users.values())
    each = sorted({len({core.l3 for core in part}) for part in parts})
    value = str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}"
    why = (
        f"workers share {shared} of {len(users)} caches, as the number of workers does not divide that of caches"
        if shared
        else "whole caches: workers do not evict each other's weights"
    )
    return [Reason(what="level-3 caches per worker", value=value, why=why)]


def _warnings(cores: Cores, domains: tuple[Domain, ...], *, proportional: bool) -> list[str]:
    nodes = {core.numa_node for core in cores}
    found = []
    if any(len({core.numa_node for core in domain.cores}) > 1 for domain in domains):
        found.append(
            f"{len(domains)} worker(s) on {len(nodes)} NUMA nodes: workers span nodes, and part of their memory is "
            "remote"
        )
    sizes = sorted({len(domain.cores) for domain in domains})
    if len(sizes) > 1 and len({core.speed for core in cores}) == 1 and not proportional:
        found.append(
            f"domains of {sizes[0]} to {sizes[-1]} cores: the smallest sets the pace of each step "
            "(balance=batch makes batches proportional to cores)"
        )
    return found
