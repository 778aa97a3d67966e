"""Choose the number of workers on a host, and divide its cores along NUMA nodes, dies, caches and core types."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TypeVar

from cputrain.affinity.planner.request import Reason
from cputrain.affinity.topology.machine import Core
from cputrain.affinity.wording import Text, numbers_text

Cores = tuple[Core, ...]

T = TypeVar("T")

LOST_BY_REMOTE_MEMORY = 0.2
EQUALLY_FAST = 0.9
LAYOUT_FIGURES = (
    Reason(
        what="lost by remote memory",
        value=f"{LOST_BY_REMOTE_MEMORY:.0%}",
        why="assumed: loss of speed of a worker whose memory is all on other NUMA nodes",
    ),
    Reason(
        what="equally fast layouts",
        value=f"within {1 - EQUALLY_FAST:.0%}",
        why="measured: a layout's rate varies as much from run to run; the other rules choose between such layouts",
    ),
)

MAX_CORES_PER_WORKER = 24
SMALL_HOST_CORES = 4
AMX = "amx_tile"  # the flag of processors on which one worker is the fastest on a small host
MAX_SIZE_RATIO = 4 / 3
WORKER_COUNT_FIGURES = (
    Reason(
        what="cores per worker",
        value=f"at most {MAX_CORES_PER_WORKER}",
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
        value=f"up to {MAX_SIZE_RATIO:.2f} times the cores of the smallest",
        why="assumed: with equal batches, the others wait for the smallest",
    ),
)


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
        return numbers_text(words, nodes=len(self.nodes), packages=len(self.packages))


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

    def throughput(self, *, proportional: bool) -> float:
        """Throughput of all workers, in cores of the fastest type with local memory.

        With equal batches all workers wait for the slowest; with `proportional` batches none waits.
        """
        throughputs = [worker_capacity(part) for part in self.parts]
        return round(sum(throughputs) if proportional else len(throughputs) * min(throughputs), 6)


def worker_capacity(part: Cores) -> float:
    """Return a worker's throughput in cores of the fastest type.

    All its cores run at the pace of the slowest; on k NUMA nodes, all but 1 / k of its memory is remote.
    """
    remote = 1 - 1 / len({core.numa_node for core in part})
    return len(part) * min(core.speed for core in part) * (1 - LOST_BY_REMOTE_MEMORY * remote)


def divide_evenly(items: tuple[T, ...], count: int) -> list[tuple[T, ...]]:
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
    layouts = [layout for layout in layouts if headroom(layout) >= 1] or layouts
    return max(
        nearly_fastest(layouts, proportional=proportional),
        key=lambda layout: (
            not layout.mixed,
            len(layout.used),
            -layout.nodes,
            layout.throughput(proportional=proportional),
        ),
    )


def nearly_fastest(layouts: Sequence[Layout], *, proportional: bool) -> list[Layout]:
    """Select the layouts that are nearly as fast as the fastest one."""
    fastest = max(layout.throughput(proportional=proportional) for layout in layouts)
    return [layout for layout in layouts if layout.throughput(proportional=proportional) >= EQUALLY_FAST * fastest]


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
    layouts = [inside_nodes(groups, ppn)]
    if ppn >= len(groups):
        layouts.append(_in_each(groups, ppn))
    for speed in sorted({core.speed for core in cores}, reverse=True):
        used = tuple(core for core in cores if core.speed == speed)
        of_this_type = uniform_groups(used)
        if ppn < len(of_this_type):
            layouts += [
                Layout(parts=tuple(whole_groups(of_this_type, ppn))),
                Layout(parts=tuple(divide_evenly(used, ppn))),
            ]
        if speed < max(core.speed for core in cores) and ppn < len(groups):
            mixed = Layout(parts=tuple(divide_evenly(tuple(core for core in cores if core.speed >= speed), ppn)))
            layouts += [mixed] if ppn < len(nodes) or not mixed.across else []
    return layouts


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
    # Dynamic programming over the number of parts. best[j]: the least sum of squared part sizes for the first j
    # groups, and the starts of these parts.
    best: list[tuple[float, tuple[int, ...]]] = [(0, ())] + [(inf, ())] * len(groups)
    for _ in range(count):
        best = [(inf, ())] + [_last_part(best, ends, j) for j in range(1, len(groups) + 1)]
    starts = (*best[-1][1], len(groups))
    return [tuple(core for group in groups[a:b] for core in group) for a, b in pairwise(starts)]


def _last_part(
    best: Sequence[tuple[float, tuple[int, ...]]], ends: Sequence[int], j: int
) -> tuple[float, tuple[int, ...]]:
    """Find the best start of a part that ends with group j; the last of equals, so that earlier parts are larger."""
    start = min(range(j), key=lambda i: (best[i][0] + (ends[j] - ends[i]) ** 2, -i))
    return best[start][0] + (ends[j] - ends[start]) ** 2, (*best[start][1], start)


def _divided(groups: Sequence[Cores], workers: Sequence[int]) -> Layout:
    divided = zip(groups, workers, strict=True)
    return Layout(parts=tuple(part for group, count in divided if count for part in divide_group(group, count)))


def divide_group(group: Cores, count: int) -> list[Cores]:
    """Divide a group into parts that differ by at most one core, along dies or else level-3 caches if possible."""
    for level in ("die", "l3"):
        units = cores_by(level, group)
        if len(units) > 1 and len(units) % count == 0:
            parts = [
                tuple(core for unit in units_of_part for core in unit)
                for units_of_part in divide_evenly(tuple(units), count)
            ]
        elif len(units) > 1 and count % len(units) == 0:
            parts = [part for unit in units for part in divide_evenly(unit, min(count // len(units), len(unit)))]
        else:
            continue
        sizes = [len(part) for part in parts]
        if len(parts) == count and max(sizes) - min(sizes) <= 1:
            return parts
    return divide_evenly(group, count)


def plausible_workers(cores: Cores) -> set[int]:
    """Return plausible numbers of workers: one per host, package, NUMA node or cache, and twice as many."""
    packages, nodes = len({core.package for core in cores}), len({core.numa_node for core in cores})
    caches = len({(core.package, core.l3) for core in cores if core.l3 is not None})
    return {1, packages, 2 * packages, nodes, 2 * nodes, caches}


def choose_layout(
    cores: Cores, max_workers: int | None, headroom: Callable[[Layout], float], *, proportional: bool, amx: bool
) -> tuple[Layout, str]:
    """Choose the number of workers and their cores, and return the layout with the reason.

    Workers stay inside NUMA nodes and have at most MAX_CORES_PER_WORKER cores. Among the nearly fastest layouts the
    order is: near-equal workers, speed, whole level-3 caches, fewest workers. `headroom` is the smallest ratio of a
    worker's memory to its need; if the layout lacks memory, fewer workers get more each. `max_workers` limits them;
    `amx`: whether the processor has AMX.
    """
    suited = _layout_by_cores(cores, proportional=proportional, amx=amx)
    why = _explain_layout(cores, suited, amx=amx)
    if max_workers is not None and max_workers < len(suited.parts):
        suited = best_layout(cores, max_workers, headroom, proportional=proportional)
        why = numbers_text(
            "the batch and the images suffice for {most_workers:worker} per host", most_workers=max_workers
        )
    if headroom(suited) >= 1:
        return suited, why
    fewer = [best_layout(cores, ppn, headroom, proportional=proportional) for ppn in range(len(suited.parts), 0, -1)]
    fitting = [layout for layout in fewer if headroom(layout) >= 1]
    if fitting:
        chosen = max(
            fitting,
            key=lambda layout: (layout.throughput(proportional=proportional), -layout.across, -len(layout.parts)),
        )
        why = "the memory is too small for the {suited:worker} that would suit the cores"
        return chosen, numbers_text(why, suited=len(suited.parts))
    return max([suited, *fewer], key=headroom), "no worker count fits in the memory; this one comes nearest"


def _layout_by_cores(cores: Cores, *, proportional: bool, amx: bool) -> Layout:
    """Choose a layout by the cores alone, without regard to memory.

    On small hosts without AMX each core has a worker, except slow cores whose worker would delay all others.
    """
    if len(cores) <= SMALL_HOST_CORES and not amx:
        fastest = [[core for core in cores if core.speed >= speed] for speed in {core.speed for core in cores}]
        single = [Layout(parts=tuple((core,) for core in chosen)) for chosen in fastest]
        return max(single, key=lambda layout: (layout.throughput(proportional=proportional), len(layout.parts)))
    groups = uniform_groups(cores)
    fewest = sum(-(-len(group) // MAX_CORES_PER_WORKER) for group in groups)
    every = [inside_nodes(groups, ppn) for ppn in range(1, min(2 * fewest, len(cores)) + 1)]
    # Very slow cores may leave no layout within the limit.
    layouts = [layout for layout in every if max(layout.sizes) <= MAX_CORES_PER_WORKER] or every
    return min(
        nearly_fastest(layouts, proportional=proportional),
        key=lambda layout: (
            not proportional and max(layout.sizes) > MAX_SIZE_RATIO * min(layout.sizes),
            -layout.throughput(proportional=proportional),
            not _whole_caches(layout),
            len(layout.parts),
        ),
    )


def _whole_caches(layout: Layout) -> bool:
    """Whether each level-3 cache belongs to a single worker."""
    caches = [{core.l3 for core in part} for part in layout.parts]
    return sum(map(len, caches)) == len(set().union(*caches))


def _explain_layout(cores: Cores, layout: Layout, *, amx: bool) -> str:
    """Explain the layout that `_layout_by_cores` chose."""
    count, groups, memories = len(layout.parts), uniform_groups(layout.used), memory_places(layout.used)
    nodes = len(memories.nodes)
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
    elif count == len(groups) == memories.count:
        why = "one for each of {groups} groups of cores ({places}), so that no worker spans two"
    elif count == len(groups):
        why = "one for each core type that computes in a NUMA node, so that no worker mixes fast and slow cores"
    else:
        what = "{nodes:NUMA node}" if len(groups) == nodes else "{groups:group} of equal cores"
        where = "its cores are divided" if memories.count == 1 else "no worker spans two"
        why = (
            f"{what} of {{group_cores:core}}; {where}, and each worker has {{worker_cores:core}}, at most "
            f"{MAX_CORES_PER_WORKER} (by published practice, several workers are faster than one)"
        )
    return numbers_text(
        why,
        cores=len(cores),
        used=len(layout.used),
        groups=len(groups),
        group_cores=tuple(map(len, groups)),
        nodes=nodes,
        places=memories.text,
        worker_cores=layout.sizes,
    )
