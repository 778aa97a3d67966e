"""Number of workers on a host, and the cores (domain) of each worker.

Usable cores are the requested ones, without cores in use by other plans' processes, limited by the CPU quota. They are
divided along NUMA nodes, dies, caches and core types. With more workers than cores, workers share cores.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import TypeVar

from cputrain.affinity.errors import RequestError
from cputrain.affinity.planner.request import SET, WORKERS_PER_HOST, Reason, Request, Unused
from cputrain.affinity.topology.machine import Core, Machine, format_list, narrowed
from cputrain.affinity.wording import Text, formatted, plural, spread

Cores = tuple[Core, ...]


def uniform_groups(cores: Cores) -> list[Cores]:
    """Group cores by NUMA node and core type, in the machine's order; cores without a node by package and type."""
    groups: dict[tuple[int | None, int | None, float], list[Core]] = {}
    for core in cores:
        package = core.package if core.numa_node is None else None
        groups.setdefault((core.numa_node, package, core.speed), []).append(core)
    return [tuple(group) for group in groups.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlaces:
    """NUMA nodes of some cores, and the packages of cores that belong to no node."""

    nodes: frozenset[int]
    packages: frozenset[int]

    @property
    def count(self) -> int:
        """Number of nodes and packages together."""
        return len(self.nodes) + len(self.packages)

    @property
    def text(self) -> Text:
        """ "2 NUMA nodes", "1 NUMA node and 1 package without one"."""
        words = "{packages:package} without NUMA node"
        if self.nodes:
            words = "{nodes:NUMA node} and {packages:package} without one" if self.packages else "{nodes:NUMA node}"
        return formatted(words, nodes=len(self.nodes), packages=len(self.packages))


def memory_places(cores: Cores) -> MemoryPlaces:
    """Return the NUMA nodes of some cores, and the packages of cores without a node."""
    return MemoryPlaces(
        nodes=frozenset(core.numa_node for core in cores if core.numa_node is not None),
        packages=frozenset(core.package for core in cores if core.numa_node is None),
    )


def cores_by(level: str, cores: Cores) -> list[Cores]:
    """Group cores by die or level-3 cache (`level` "die" or "l3"); one group per package if the level is unknown."""
    units: dict[tuple[int, int | None], list[Core]] = {}
    for core in cores:
        units.setdefault((core.package, core.die if level == "die" else core.l3), []).append(core)
    return [tuple(unit) for unit in units.values()]


T = TypeVar("T")

LOST_BY_REMOTE_MEMORY = 0.2
NEARLY = 0.9
LAYOUT_FIGURES = (
    Reason(
        what="lost by remote memory",
        value=f"{LOST_BY_REMOTE_MEMORY:.0%}",
        why="assumed: loss of speed of a worker whose memory is all on other NUMA nodes",
    ),
    Reason(
        what="equally fast layouts",
        value=f"within {1 - NEARLY:.0%}",
        why="measured: a layout's rate varies as much from run to run; the other rules choose between such layouts",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The cores of each worker, in the machine's order."""

    parts: tuple[Cores, ...]

    @property
    def used(self) -> Cores:
        """The cores of all workers."""
        return tuple(core for part in self.parts for core in part)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Cores of each worker."""
        return tuple(map(len, self.parts))

    @property
    def across(self) -> int:
        """Number of workers whose cores span several NUMA nodes."""
        return sum(len({core.numa_node for core in part}) > 1 for part in self.parts)

    @property
    def nodes(self) -> int:
        """Sum of the workers' numbers of NUMA nodes."""
        return sum(len({core.numa_node for core in part}) for part in self.parts)

    @property
    def mixed(self) -> bool:
        """Whether a worker has cores of several types."""
        return any(len({core.speed for core in part}) > 1 for part in self.parts)

    def pace(self, *, proportional: bool) -> float:
        """Throughput of all workers, in cores of the fastest type with local memory.

        With equal batches all workers wait for the slowest; with `proportional` batches none waits.
        """
        each = [capacity(part) for part in self.parts]
        return round(sum(each) if proportional else len(each) * min(each), 6)


def capacity(part: Cores) -> float:
    """Return a worker's throughput in cores of the fastest type.

    All its cores run at the pace of the slowest; on k NUMA nodes, all but 1 / k of its memory is remote.
    """
    remote = 1 - 1 / len({core.numa_node for core in part})
    return len(part) * min(core.speed for core in part) * (1 - LOST_BY_REMOTE_MEMORY * remote)


def shares(items: tuple[T, ...], count: int) -> list[tuple[T, ...]]:
    """Divide items into `count` consecutive shares whose sizes differ by at most one."""
    bounds = [len(items) * i // count for i in range(count + 1)]
    return [items[a:b] for a, b in pairwise(bounds)]


def best_layout(cores: Cores, ppn: int, headroom: Callable[[Layout], float], *, proportional: bool) -> Layout:
    """Choose the fastest layout of exactly ppn workers, at most one per core.

    Layouts that fit in memory come first: `headroom` is the smallest ratio of a worker's memory to its need. Among
    nearly equal layouts those whose workers have cores of one type win, then the one that uses most cores, then the one
    whose workers have the fewest NUMA nodes.
    """
    layouts = _layouts(cores, ppn)
    layouts = [one for one in layouts if headroom(one) >= 1] or layouts
    return max(
        nearly_fastest(layouts, proportional=proportional),
        key=lambda one: (not one.mixed, len(one.used), -one.nodes, one.pace(proportional=proportional)),
    )


def nearly_fastest(layouts: Sequence[Layout], *, proportional: bool) -> list[Layout]:
    """Select the layouts that are nearly as fast as the fastest one."""
    most = max(one.pace(proportional=proportional) for one in layouts)
    return [one for one in layouts if one.pace(proportional=proportional) >= NEARLY * most]


def inside_nodes(groups: Sequence[Cores], ppn: int) -> Layout:
    """Place workers inside groups of equal cores, the smallest worker as large as possible; small groups stay empty."""
    workers = [0] * len(groups)
    for _ in range(ppn):
        widest = max(
            range(len(groups)),
            key=lambda i: (len(groups[i]) // (workers[i] + 1) * groups[i][0].speed, -workers[i], -i),
        )
        workers[widest] += 1
    return _divided(groups, workers)


def _layouts(cores: Cores, ppn: int) -> list[Layout]:
    """List the candidates: workers inside NUMA nodes, with or without a worker in each; across nodes, or with cores of
    several types, if they are fewer than the groups of equal cores."""
    groups, nodes = uniform_groups(cores), {core.numa_node for core in cores}
    found = [inside_nodes(groups, ppn)]
    if ppn >= len(groups):
        found.append(_in_each(groups, ppn))
    for speed in sorted({core.speed for core in cores}, reverse=True):
        used = tuple(core for core in cores if core.speed == speed)
        of_this_type = uniform_groups(used)
        if ppn < len(of_this_type):
            found += [Layout(parts=tuple(whole_groups(of_this_type, ppn))), Layout(parts=tuple(shares(used, ppn)))]
        if speed < max(core.speed for core in cores) and ppn < len(groups):
            mixed = Layout(parts=tuple(shares(tuple(core for core in cores if core.speed >= speed), ppn)))
            found += [mixed] if ppn < len(nodes) or not mixed.across else []
    return found


def _in_each(groups: Sequence[Cores], ppn: int) -> Layout:
    """Place workers inside groups, at least one in each."""
    workers = [1] * len(groups)
    for _ in range(ppn - len(groups)):
        widest = max(
            range(len(groups)), key=lambda i: (len(groups[i]) / workers[i] * (workers[i] < len(groups[i])), -i)
        )
        workers[widest] += 1
    return _divided(groups, workers)


def whole_groups(groups: Sequence[Cores], count: int) -> list[Cores]:
    """Divide consecutive whole groups into `count` parts of sizes as equal as possible; larger parts come first."""
    ends = [0]
    for group in groups:
        ends.append(ends[-1] + len(group))
    # Dynamic programming over the number of parts. least[j]: the least sum of squared part sizes for the first j
    # groups, and the starts of these parts.
    least: list[tuple[float, tuple[int, ...]]] = [(0, ())] + [(inf, ())] * len(groups)
    for _ in range(count):
        least = [(inf, ())] + [_last_part(least, ends, j) for j in range(1, len(groups) + 1)]
    starts = (*least[-1][1], len(groups))
    return [tuple(core for group in groups[a:b] for core in group) for a, b in pairwise(starts)]


def _last_part(
    least: Sequence[tuple[float, tuple[int, ...]]], ends: Sequence[int], j: int
) -> tuple[float, tuple[int, ...]]:
    """Find the best start of a part that ends with group j; the last of equals, so that earlier parts are larger."""
    start = min(range(j), key=lambda i: (least[i][0] + (ends[j] - ends[i]) ** 2, -i))
    return least[start][0] + (ends[j] - ends[start]) ** 2, (*least[start][1], start)


def _divided(groups: Sequence[Cores], workers: Sequence[int]) -> Layout:
    each = zip(groups, workers, strict=True)
    return Layout(parts=tuple(part for group, count in each if count for part in divide_group(group, count)))


def divide_group(group: Cores, count: int) -> list[Cores]:
    """Divide a group into parts that differ by at most one core, along dies or else level-3 caches if possible."""
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


MOST_CORES_PER_WORKER = 24
SMALL_HOST_CORES = 4
AMX = "amx_tile"  # the flag of processors on which one worker is the fastest on a small host
NEAR_EQUAL = 4 / 3
WORKER_COUNT_FIGURES = (
    Reason(
        what="cores per worker",
        value=f"at most {MOST_CORES_PER_WORKER}",
        why="published: SURFsara-Intel 2018, 256 hosts (24, a package), MLPerf v0.5 on 2 x 28 cores (14, half "
        "a package)",
    ),
    Reason(
        what="hosts with a worker per core",
        value=f"at most {SMALL_HOST_CORES} cores, without AMX",
        why="measured on 2 cores: 2 x 1 thread train ResNet-50 1.2-1.35 times as fast as 1 x 2 on AMD Zen 3, about as "
        "fast on AMD Zen 4, 0.9-0.95 times as fast on a Xeon with AMX. Not measured on larger hosts, where each "
        "additional worker costs memory and a rank in every all-reduce; `cputrain tune` measures a host, and its plan "
        "replaces the rule's",
    ),
    Reason(
        what="near-equal workers",
        value=f"up to {NEAR_EQUAL:.2f} times the cores of the smallest",
        why="assumed: with equal batches, the others wait for the smallest",
    ),
)


def plausible_workers(cores: Cores) -> set[int]:
    """Return plausible numbers of workers: one per host, package, NUMA node or cache, and twice as many."""
    packages, nodes = len({core.package for core in cores}), len({core.numa_node for core in cores})
    caches = len({(core.package, core.l3) for core in cores if core.l3 is not None})
    return {1, packages, 2 * packages, nodes, 2 * nodes, caches}


def choose_layout(
    cores: Cores, most: int | None, headroom: Callable[[Layout], float], *, proportional: bool, amx: bool
) -> tuple[Layout, str]:
    """Choose the number of workers and their cores, and return the layout with the reason.

    Workers stay inside NUMA nodes and have at most MOST_CORES_PER_WORKER cores. Among the nearly fastest layouts the
    order is: near-equal workers, speed, whole level-3 caches, fewest workers. `headroom` is the smallest ratio of a
    worker's memory to its need; if the layout lacks memory, fewer workers get more each. `most`: limit on the workers.
    `amx`: whether the processor has AMX.
    """
    suited = _layout_by_cores(cores, proportional=proportional, amx=amx)
    why = _explain_layout(cores, suited, amx=amx)
    if most is not None and most < len(suited.parts):
        suited = best_layout(cores, most, headroom, proportional=proportional)
        why = formatted("the batch and the images suffice for {most_workers:worker} per host", most_workers=most)
    if headroom(suited) >= 1:
        return suited, why
    fewer = [best_layout(cores, ppn, headroom, proportional=proportional) for ppn in range(len(suited.parts), 0, -1)]
    fitting = [layout for layout in fewer if headroom(layout) >= 1]
    if fitting:
        chosen = max(fitting, key=lambda one: (one.pace(proportional=proportional), -one.across, -len(one.parts)))
        why = "the memory is too small for the {suited:worker} that would suit the cores"
        return chosen, formatted(why, suited=len(suited.parts))
    return max([suited, *fewer], key=headroom), "no worker count fits in the memory; this one comes nearest"


def _layout_by_cores(cores: Cores, *, proportional: bool, amx: bool) -> Layout:
    """Choose a layout by the cores alone, without regard to memory.

    On small hosts without AMX each core has a worker, except slow cores whose worker would delay all others.
    """
    if len(cores) <= SMALL_HOST_CORES and not amx:
        fastest = [[core for core in cores if core.speed >= speed] for speed in {core.speed for core in cores}]
        single = [Layout(parts=tuple((core,) for core in kept)) for kept in fastest]
        return max(single, key=lambda one: (one.pace(proportional=proportional), len(one.parts)))
    groups = uniform_groups(cores)
    fewest = sum(-(-len(group) // MOST_CORES_PER_WORKER) for group in groups)
    every = [inside_nodes(groups, ppn) for ppn in range(1, min(2 * fewest, len(cores)) + 1)]
    # Very slow cores may leave no layout within the limit.
    layouts = [layout for layout in every if max(layout.sizes) <= MOST_CORES_PER_WORKER] or every
    return min(
        nearly_fastest(layouts, proportional=proportional),
        key=lambda one: (
            not proportional and max(one.sizes) > NEAR_EQUAL * min(one.sizes),
            -one.pace(proportional=proportional),
            not _whole_caches(one),
            len(one.parts),
        ),
    )


def _whole_caches(layout: Layout) -> bool:
    """Whether each level-3 cache belongs to a single worker."""
    each = [{core.l3 for core in part} for part in layout.parts]
    return sum(map(len, each)) == len(set().union(*each))


def _explain_layout(cores: Cores, layout: Layout, *, amx: bool) -> str:
    """Explain the layout that `_layout_by_cores` chose."""
    count, groups, places = len(layout.parts), uniform_groups(layout.used), memory_places(layout.used)
    nodes = len(places.nodes)
    if len(cores) == 1:
        why = "one for the only core"
    elif len(cores) <= SMALL_HOST_CORES and not amx:
        which = "each core" if count == len(cores) else "each of the {used} fastest of {cores} cores"
        why = (
            f"one for {which}: with {SMALL_HOST_CORES} cores or fewer, a worker per core is no slower without AMX (two "
            "cores of AMD Zen 3: 1.2-1.35x over one worker of two threads; of Zen 4: about equal); cputrain tune "
            "measures this host"
        )
    elif len(cores) <= SMALL_HOST_CORES and count == 1:
        why = (
            f"one for the host: with {SMALL_HOST_CORES} cores or fewer and AMX, one worker is faster (two cores of a "
            "Xeon with AMX: 1.05-1.1x over two workers of one thread); cputrain tune measures this host"
        )
    elif count == len(groups) == 1:
        some = "" if len(layout.used) == len(cores) else "{used} of "
        why = f"one for the host, as {some}its {{cores}} cores suit a single worker"
    elif count == len(groups) == nodes:
        why = "one for each of {nodes} NUMA nodes, so that no worker spans two"
    elif count == len(groups) == places.count:
        why = "one for each of {groups} groups of cores ({places}), so that no worker spans two"
    elif count == len(groups):
        why = "one for each core type that computes in a NUMA node, so that no worker mixes fast and slow cores"
    else:
        what = "{nodes:NUMA node}" if len(groups) == nodes else "{groups:group} of equal cores"
        where = "its cores are divided" if places.count == 1 else "no worker spans two"
        why = (
            f"{what} of {{group_cores:core}}; {where}, and each worker has {{worker_cores:core}}, at most "
            f"{MOST_CORES_PER_WORKER} (by published practice, several workers are faster than one)"
        )
    return formatted(
        why,
        cores=len(cores),
        used=len(layout.used),
        groups=len(groups),
        group_cores=tuple(map(len, groups)),
        nodes=nodes,
        places=places.text,
        worker_cores=layout.sizes,
    )


OTHER_TYPE = "another core type than the compute cores; a mixed worker would run at the slowest core's speed"
MOST_TRIED = 16  # numbers of workers below the requested one
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
    most: int | None = None,
    proportional: bool,
    headroom: Callable[[tuple[Domain, ...]], float],
) -> Partition:
    """Divide the allowed cores into ppn domains; None lets the rules choose the number, at most `most`.

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
        layout, ppn_why = choose_layout(cores, most, room, proportional=proportional, amx=AMX in machine.isa)
    else:
        layout = best_layout(cores, ppn, room, proportional=proportional)
    faster = None if ppn is None or proportional else _faster_layout(cores, layout, room)
    domains = domains_of(cores, layout)
    return Partition(
        domains=domains,
        unused=tuple(_unused(cores, domains)),
        reasons=(
            Reason(what=WORKERS_PER_HOST, value=formatted("{workers}", workers=len(domains)), why=ppn_why),
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
        here = [i for i, part in enumerate(layout.parts) if any(core.numa_node == node for core in part)]
        divided = shares(tuple(core for core in idle if core.numa_node == node), len(here)) if here else []
        for i, part in zip(here, divided, strict=True):
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
    return [Reason(what="core types", value=counts, why=formatted(why, speed=used[0].speed))]


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
            value=formatted("{each}", each=tuple(map(len, caches))),
            why=formatted(why, workers=len(caches), shared=shared, caches=len(every)),
        )
    ]


def _faster_layout(cores: Cores, layout: Layout, headroom: Callable[[Layout], float]) -> Layout | None:
    """Find a clearly faster layout with somewhat fewer workers, if the domains are unequal."""
    if max(layout.sizes) == min(layout.sizes):
        return None
    count, pace = len(layout.parts), layout.pace(proportional=False)
    numbers = range(count - 1, max(count // 2, count - MOST_TRIED - 1), -1)
    fewer = (best_layout(cores, ppn, headroom, proportional=False) for ppn in numbers)
    return next((one for one in fewer if NEARLY * one.pace(proportional=False) > pace and headroom(one) >= 1), None)


def _hint_at(faster: Layout | None, layout: Layout) -> str:
    if faster is None:
        return ""
    times = faster.pace(proportional=False) / layout.pace(proportional=False)
    return f"; {{ppn={len(faster.parts)}}} computes {times:.1f} times as much"


def _warnings(layout: Layout, faster: Layout | None, *, proportional: bool) -> list[str]:
    found = []
    if layout.across:
        places = memory_places(layout.used)
        if len(layout.parts) == 1:
            found.append(f"the worker spans {places.text}: part of its memory is remote")
        else:
            workers = f"{layout.across} of {len(layout.parts)} workers"
            found.append(f"{workers} span several of the {places.text}: part of their memory is remote")
    one_type = len({core.speed for core in layout.used}) == 1
    if max(layout.sizes) > min(layout.sizes) and one_type and not proportional:
        found.append(
            f"domains of {spread(layout.sizes, 'core')}: the smallest sets the pace of each step "
            f"({{balance=batch}} makes batches proportional to cores{_hint_at(faster, layout)})"
        )
    return found


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
    found = UsableCores(machine=machine)
    for narrow in (_requested, _without_isolated, _fastest, _without_occupied, _within_quota):
        step = narrow(found.machine, request)
        found = UsableCores(
            machine=step.machine,
            unused=step.unused + found.unused,
            reasons=found.reasons + step.reasons,
            warnings=found.warnings + step.warnings,
        )
    return found


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
    others = tuple(pu for pu in machine.allowed_pus if pu not in isolated)
    if not isolated:
        return UsableCores(machine=machine)
    listed = format_list(isolated)
    if request.cores or not others:
        bound = (
            f"CPUs {listed} are isolated (isolcpus): the scheduler moves no thread between them, so each OpenMP, "
            "loader and comm thread is bound to one CPU; all other threads of the program stay on a single CPU"
        )
        return UsableCores(machine=machine, warnings=(bound,))
    why = "the others are isolated (isolcpus), and the scheduler moves no thread between them"
    used = Reason(what="CPUs used", value=format_list(others), why=why)
    left = f"CPUs {listed} are isolated (isolcpus) and left out: {{cores={listed}}} uses them, with a thread on each"
    found = _only(machine, others, used, unused_why=f"isolated (isolcpus); {{cores={listed}}} uses them")
    return replace(found, warnings=(left,))


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
    kept = tuple(core for core in cores if busy.isdisjoint(core.pus))
    if not kept:
        raise RequestError(
            f"{{share=true}}: processes of other plans use all {plural(len(cores), 'core')} available to this process "
            f"on host {machine.name}; wait until they end, or plan without {{share}}"
        )
    why = "the others are in use by processes of other plans ({share=true})"
    return _narrowed(machine, kept, why, unused_why="on cores in use by processes of other plans")


def _within_quota(machine: Machine, request: Request) -> UsableCores:
    """Keep as many PUs as the control groups' CPU quota lets run all the time.

    Whole cores with `smt`, else one PU per core, so that no hyper-thread takes CPU time from compute threads.
    """
    cores, quota = machine.allowed_cores, machine.cpu_quota
    running = len(machine.allowed_pus) if quota is None else max(1, int(quota))
    if quota is None or running >= len(machine.allowed_pus):
        return UsableCores(machine=machine)
    each = min(running, max(len(core.pus) for core in cores)) if request.smt else 1
    best = _best_cores(machine, cores, running // each)
    kept = tuple(replace(core, pus=core.pus[:each]) for core in best)
    effect = "more threads would all be throttled" if quota >= 1 else "even a single thread is throttled"
    why = formatted("the control group's quota is the time of {quota:g} CPUs, and {effect}", quota=quota, effect=effect)
    step = _narrowed(machine, kept, why, unused_why="beyond the CPU quota")
    second = tuple(sorted(pu for core in best for pu in core.pus[each:]))
    beyond = Unused(pus=tuple(pu for pu in step.unused[0].pus if pu not in second), why=step.unused[0].why)
    others = Unused(pus=second, why="hyper-threads of used cores; the CPU quota is too small for all threads")
    return replace(step, unused=tuple(item for item in (beyond, others) if item.pus))


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
        here = memory.get(group[0].numa_node, 0) if group[0].numa_node is not None else 0
        return (here == 0, -group[0].speed, -min(len(group), count), -here)

    best = [core for group in sorted(uniform_groups(cores), key=order) for core in group][:count]
    return tuple(core for core in cores if core in best)


def _narrowed(machine: Machine, kept: tuple[Core, ...], why: str, *, unused_why: str) -> UsableCores:
    value = formatted("{used} of {allowed}", used=len(kept), allowed=len(machine.allowed_cores))
    used = Reason(what="cores used", value=value, why=why)
    return _only(machine, (pu for core in kept for pu in core.pus), used, unused_why=unused_why)


def _only(machine: Machine, pus: Iterable[int], used: Reason, *, unused_why: str) -> UsableCores:
    """Keep these allowed PUs; `used` explains them, `unused_why` the others."""
    kept = frozenset(pus)
    unused = Unused(pus=tuple(pu for pu in machine.allowed_pus if pu not in kept), why=unused_why)
    return UsableCores(machine=narrowed(machine, kept), unused=(unused,), reasons=(used,))


def partition_shared(machine: Machine, ppn: int) -> Partition:
    """Give each of more workers than cores one core; the numbers of workers per core differ by at most one.

    Workers on the same core divide its PUs before two of them share a PU.
    """
    cores = machine.allowed_cores
    domains = tuple(
        Domain(cores=(part,))
        for core, workers in zip(cores, shares(tuple(range(ppn)), len(cores)), strict=True)
        for part in _parts(core, len(workers))
    )
    most = -(-ppn // len(cores))
    why = formatted("{set}, more than the {cores:core} ({{oversubscribe=true}})", set=SET, cores=len(cores))
    return Partition(
        domains=domains,
        unused=(),
        reasons=(Reason(what=WORKERS_PER_HOST, value=formatted("{workers}", workers=ppn), why=why),),
        warnings=(
            f"oversubscribed: {ppn} workers share {plural(len(cores), 'core')}, up to {most} per core, and "
            "slow each other down; use this to test a number of workers, not to measure speed",
        ),
    )


def _parts(core: Core, count: int) -> list[Core]:
    """Return a copy of the core for each of its workers, with that worker's PUs."""
    pus = core.pus
    starts = [i * len(pus) // count for i in range(count)]
    ends = [max(start + 1, (i + 1) * len(pus) // count) for i, start in enumerate(starts)]
    return [replace(core, pus=pus[start:end]) for start, end in zip(starts, ends, strict=True)]
