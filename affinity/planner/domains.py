"""Cutting a host's cores into one domain per worker, along its NUMA nodes, dies, caches and kinds of cores."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from affinity.errors import InputError
from affinity.topology.machine import Core, Machine

T = TypeVar("T")
Group = tuple[Core, ...]

# The 256-node run gave one worker the 24 cores of a package; MLPerf v0.5 on 2 x 28 cores ran two workers a package.
MOST_CORES_PER_WORKER = 24
# On two cores, 2 workers x 1 thread train ResNet-50 1.2-1.35x faster than 1 x 2: one thread a worker scales best.
SMALL_NODE_CORES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """One worker's cores: all of one kind, from which it computes; and `free` ones, too slow to compute beside them."""

    cores: Group
    free: Group = ()

    @property
    def capacity(self) -> float:
        """How much it computes, in cores of the fastest kind."""
        return sum(core.speed for core in self.cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The domains by local rank, why so many, what else decided the cut, and what could not be helped.

    `left` are slow cores in NUMA nodes where nobody computes.
    """

    domains: tuple[Domain, ...]
    left: Group
    why_count: str
    notes: tuple[tuple[str, str, str], ...]
    warnings: tuple[str, ...]


def shares(items: tuple[T, ...], count: int) -> list[tuple[T, ...]]:
    """Cut items into count consecutive shares whose sizes differ by at most one."""
    cuts = [len(items) * i // count for i in range(count + 1)]
    return [items[a:b] for a, b in pairwise(cuts)]


def cut_host(machine: Machine, ppn: int | None, *, proportional: bool) -> Cut:
    """Cut the allowed cores into ppn domains; None lets the rules say how many.

    With at least as many workers as NUMA nodes no domain crosses a node: each node gets workers in proportion to its
    cores, at least one. Domains have cores of one kind, where ppn leaves that possible. `proportional`: workers get
    batches in proportion to their cores, so a small domain holds up nobody. Raises InputError when more workers are
    asked for than cores are lent.
    """
    cores = machine.allowed_cores
    if ppn is not None and ppn > len(cores):
        raise InputError(
            f"ppn={ppn} needs {ppn} cores; host {machine.name} lends {len(cores)}: set ppn to {len(cores)} or fewer, "
            "or let workers share cores with --oversubscribe (plan.oversubscribe=true)"
        )
    used = _computing(cores, ppn, proportional=proportional)
    cut = cut_cores(used, ppn)
    busy = {pu for core in used for pu in core.pus}
    domains = _with_free(tuple(Domain(cores=part) for part in cut), tuple(c for c in cores if not busy & {*c.pus}))
    given = {pu for domain in domains for core in (*domain.cores, *domain.free) for pu in core.pus}
    notes = _about_kinds(cores, used, proportional=proportional) + _about_caches(used, cut)
    return Cut(
        domains=domains,
        left=tuple(core for core in cores if not given & {*core.pus}),
        why_count="asked for" if ppn is not None else _why_count(used, len(cut)),
        notes=tuple(notes),
        warnings=tuple(_warnings(used, domains, proportional=proportional)),
    )


def groups_of(cores: Group) -> list[Group]:
    """The cores of each NUMA node and kind, in the machine's order; those without a node form one group a kind."""
    groups: dict[tuple[int | None, float], list[Core]] = {}
    for core in cores:
        groups.setdefault((core.numa_node, core.speed), []).append(core)
    return [tuple(group) for group in groups.values()]


def cut_cores(cores: Group, ppn: int | None) -> list[Group]:
    """Cut cores into ppn parts (None: as many as suit their groups), crossing groups only where ppn is smaller."""
    groups = groups_of(cores)
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
    return [part for group, count in zip(groups, counts, strict=True) for part in cut_group(group, count)]


def workers_in(group: Group) -> int:
    """Workers that suit a group of one kind of cores in one NUMA node.

    As few as leave none too wide; up to twice as many where only that gives all the same, best of whole level-3 caches.
    """
    if len(group) <= SMALL_NODE_CORES:
        return len(group)
    fewest = -(-len(group) // MOST_CORES_PER_WORKER)
    caches = len(_units(group, "l3"))
    counts = range(fewest, 2 * fewest + 1)
    even = [n for n in counts if caches > 1 and caches % n == 0] or [n for n in counts if len(group) % n == 0]
    return even[0] if even else fewest


def cut_group(group: Group, count: int) -> list[Group]:
    """Cut one group into parts that differ by a core at most: along dies, else level-3 caches, where that can be."""
    for level in ("die", "l3"):
        units = _units(group, level)
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


def _units(group: Group, level: str) -> list[Group]:
    """The group's cores by package and die, or by level-3 cache; one unit where the level is not known."""
    units: dict[tuple[int, int | None], list[Core]] = {}
    for core in group:
        units.setdefault((core.package, core.die if level == "die" else core.l3), []).append(core)
    return [tuple(unit) for unit in units.values()]


def _computing(cores: Group, ppn: int | None, *, proportional: bool) -> Group:
    """The cores that compute: those of one kind or of all, whichever gets most done in a step.

    With equal batches every worker takes as long as the slowest, with batches in proportion all take the same time.
    Where ppn fits no kind's cores, all compute as if they were slow ones: some worker has cores of two kinds.
    """
    speeds = sorted({core.speed for core in cores}, reverse=True)
    nodes = {core.numa_node for core in cores}

    def fits(used: Group) -> bool:
        may_span = ppn is not None and ppn < len(nodes) and len({core.speed for core in used}) == 1
        return ppn is None or (ppn <= len(used) and (ppn >= len(groups_of(used)) or may_span))

    def done(used: Group) -> float:
        capacities = [Domain(cores=part).capacity for part in cut_cores(used, ppn)]
        return sum(capacities) if proportional else len(capacities) * min(capacities)

    choices = [tuple(core for core in cores if core.speed == speed) for speed in speeds]
    fitting = [used for used in (*choices, cores) if fits(used)]
    if not fitting:
        return tuple(replace(core, speed=speeds[-1]) for core in cores)
    return max(fitting, key=done)


def _with_free(domains: tuple[Domain, ...], free: Group) -> tuple[Domain, ...]:
    """Share the free cores of each NUMA node among the domains that compute there."""
    given: list[Group] = [()] * len(domains)
    for node in {core.numa_node for core in free}:
        here = [i for i, domain in enumerate(domains) if any(core.numa_node == node for core in domain.cores)]
        parts = shares(tuple(core for core in free if core.numa_node == node), len(here)) if here else []
        for i, part in zip(here, parts, strict=True):
            given[i] += part
    return tuple(Domain(cores=domain.cores, free=part) for domain, part in zip(domains, given, strict=True))


def _why_count(cores: Group, count: int) -> str:
    groups = groups_of(cores)
    smallest, largest = min(map(len, groups)), max(map(len, groups))
    if largest <= SMALL_NODE_CORES:
        return (
            f"one for each of {len(cores)} cores: on nodes of {SMALL_NODE_CORES} cores or fewer, "
            "one thread a worker trains fastest (measured: 1.2-1.35x over one worker of two threads)"
        )
    if count == len(groups) and len({core.speed for core in cores}) > 1:
        return f"one for each kind of core in each NUMA node ({count} of them): no worker waits for its own slow cores"
    if count == len(groups):
        return f"one for each NUMA node ({count} of them): no worker's memory is remote"
    size = str(largest) if smallest == largest else f"{smallest}-{largest}"
    return (
        f"{len(groups)} NUMA node(s) of {size} cores, cut so that no worker "
        f"has more than {MOST_CORES_PER_WORKER} cores: several workers a node outrun one (published practice)"
    )


def _about_kinds(cores: Group, used: Group, *, proportional: bool) -> list[tuple[str, str, str]]:
    """Which kinds of cores compute, where there are several."""
    speeds = sorted({core.speed for core in cores}, reverse=True)
    if len(speeds) == 1:
        return []
    counted = ", ".join(f"{sum(core.speed == s for core in cores)} of speed {s:.2f}" for s in speeds)
    if len(used) < len(cores):
        why = (
            f"those of speed {used[0].speed:.2f} compute: a step waits for its slowest core, "
            "and with the others in it less would get done; these may load and communicate"
        )
    elif len({core.speed for core in used}) > 1:
        how = "a batch in proportion each" if proportional else "the slowest worker sets the pace"
        why = f"a worker has cores of one kind; {how}, and all together still do most"
    else:
        why = "all compute at the slow ones' pace: so many workers leave some with cores of two kinds"
    return [("kinds of cores", counted, why)]


def _about_caches(cores: Group, cut: list[Group]) -> list[tuple[str, str, str]]:
    """Which level-3 caches a worker has, where a NUMA node has several."""
    several = any(len(_units(group, "l3")) > 1 for group in groups_of(cores))
    if not several or any(core.l3 is None for core in cores):
        return []
    owners: dict[int | None, set[int]] = {}
    for i, part in enumerate(cut):
        for core in part:
            owners.setdefault(core.l3, set()).add(i)
    shared = sum(len(workers) > 1 for workers in owners.values())
    each = sorted({len({core.l3 for core in part}) for part in cut})
    value = str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}"
    why = (
        f"{shared} of {len(owners)} caches are shared by workers, as their numbers do not divide"
        if shared
        else "whole caches: workers do not evict each other's weights"
    )
    return [("level-3 caches per worker", value, why)]


def _warnings(cores: Group, domains: tuple[Domain, ...], *, proportional: bool) -> list[str]:
    nodes = {core.numa_node for core in cores}
    found = []
    if any(len({core.numa_node for core in domain.cores}) > 1 for domain in domains):
        found.append(
            f"{len(domains)} worker(s) on {len(nodes)} NUMA nodes: workers span nodes, part of their memory is remote"
        )
    sizes = sorted({len(domain.cores) for domain in domains})
    if len(sizes) > 1 and len({core.speed for core in cores}) == 1 and not proportional:
        found.append(
            f"domains of {sizes[0]} to {sizes[-1]} cores: the smallest sets the pace of each step "
            "(--balance batch gives each a batch in proportion)"
        )
    return found
