"""Cores -> a part for each worker: inside NUMA nodes where there are enough workers, else whole nodes, else equal cuts.

Geometry alone; how many workers suit a host is decided in worker_count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TypeVar

from affinity.planner.core_groups import Cores, cores_by, uniform_groups
from affinity.planner.reasons import Reason

T = TypeVar("T")

LOST_BY_REMOTE_MEMORY = 0.2
NEARLY = 0.9
FIGURES = (
    Reason(
        what="lost by remote memory",
        value=f"{LOST_BY_REMOTE_MEMORY:.0%}",
        why="assumed: of the speed of a worker whose memory is all on other NUMA nodes",
    ),
    Reason(
        what="equally fast layouts",
        value=f"within {1 - NEARLY:.0%}",
        why="measured: the rate of one layout varies by as much from run to run; the other rules decide between them",
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
        """Workers whose cores are in several NUMA nodes."""
        return sum(len({core.numa_node for core in part}) > 1 for part in self.parts)

    @property
    def nodes(self) -> int:
        """NUMA nodes of all workers, those of several workers as often."""
        return sum(len({core.numa_node for core in part}) for part in self.parts)

    def pace(self, *, proportional: bool) -> float:
        """What the workers compute together, in cores of the fastest type, without remote memory.

        With equal batches all wait for the slowest; with `proportional` ones none waits.
        """
        each = [capacity(part) for part in self.parts]
        return round(sum(each) if proportional else len(each) * min(each), 6)


def capacity(part: Cores) -> float:
    """What one worker computes, in cores of the fastest type: all its cores keep the slowest one's pace. Of a worker
    on k NUMA nodes, all but 1 / k of the memory is remote."""
    remote = 1 - 1 / len({core.numa_node for core in part})
    return len(part) * min(core.speed for core in part) * (1 - LOST_BY_REMOTE_MEMORY * remote)


def shares(items: tuple[T, ...], count: int) -> list[tuple[T, ...]]:
    """Divide items into `count` consecutive shares whose sizes differ by at most one."""
    bounds = [len(items) * i // count for i in range(count + 1)]
    return [items[a:b] for a, b in pairwise(bounds)]


def best_layout(cores: Cores, ppn: int, headroom: Callable[[Layout], float], *, proportional: bool) -> Layout:
    """The layout of exactly ppn workers, at most one per core, that computes most; of nearly equal ones the one that
    uses most cores, then the one whose workers have the fewest NUMA nodes. A worker has cores of one type.

    Layouts that fit in memory come first: `headroom` is the least ratio of a worker's memory to its need.
    """
    layouts = _layouts(cores, ppn)
    layouts = [one for one in layouts if headroom(one) >= 1] or layouts
    return max(
        nearly_fastest(layouts, proportional=proportional),
        key=lambda one: (len(one.used), -one.nodes, one.pace(proportional=proportional)),
    )


def nearly_fastest(layouts: Sequence[Layout], *, proportional: bool) -> list[Layout]:
    """Those that compute nearly as much as the one that computes most."""
    most = max(one.pace(proportional=proportional) for one in layouts)
    return [one for one in layouts if one.pace(proportional=proportional) >= NEARLY * most]


def inside_nodes(groups: Sequence[Cores], ppn: int) -> Layout:
    """Workers inside groups of equal cores, the smallest as large as possible; a group that is too small has none."""
    workers = [0] * len(groups)
    for _ in range(ppn):
        widest = max(
            range(len(groups)),
            key=lambda i: (len(groups[i]) // (workers[i] + 1) * groups[i][0].speed, -workers[i], -i),
        )
        workers[widest] += 1
    return _divided(groups, workers)


def _layouts(cores: Cores, ppn: int) -> list[Layout]:
    """Inside NUMA nodes, with a worker in each or not; and for fewer workers than nodes, across nodes."""
    groups = uniform_groups(cores)
    found = [inside_nodes(groups, ppn)]
    if ppn >= len(groups):
        found.append(_in_each(groups, ppn))
    for speed in sorted({core.speed for core in cores}, reverse=True):
        used = tuple(core for core in cores if core.speed == speed)
        of_this_type = uniform_groups(used)
        if ppn < len(of_this_type):
            found += [Layout(parts=tuple(whole_groups(of_this_type, ppn))), Layout(parts=tuple(shares(used, ppn)))]
    return found


def _in_each(groups: Sequence[Cores], ppn: int) -> Layout:
    """Workers inside groups, at least one in each."""
    workers = [1] * len(groups)
    for _ in range(ppn - len(groups)):
        widest = max(
            range(len(groups)), key=lambda i: (len(groups[i]) / workers[i] * (workers[i] < len(groups[i])), -i)
        )
        workers[widest] += 1
    return _divided(groups, workers)


def whole_groups(groups: Sequence[Cores], count: int) -> list[Cores]:
    """Consecutive whole groups for each of `count` parts, of sizes as equal as possible; larger parts come first."""
    ends = [0]
    for group in groups:
        ends.append(ends[-1] + len(group))
    # least[j]: the least sum of squared sizes of the first j groups in so many parts, and where those parts start.
    least: list[tuple[float, tuple[int, ...]]] = [(0, ())] + [(inf, ())] * len(groups)
    for _ in range(count):
        least = [(inf, ())] + [_last_part(least, ends, j) for j in range(1, len(groups) + 1)]
    starts = (*least[-1][1], len(groups))
    return [tuple(core for group in groups[a:b] for core in group) for a, b in pairwise(starts)]


def _last_part(
    least: Sequence[tuple[float, tuple[int, ...]]], ends: Sequence[int], j: int
) -> tuple[float, tuple[int, ...]]:
    """The best start of a part that ends with group j; of equal ones the last, so that earlier parts are larger."""
    start = min(range(j), key=lambda i: (least[i][0] + (ends[j] - ends[i]) ** 2, -i))
    return least[start][0] + (ends[j] - ends[start]) ** 2, (*least[start][1], start)


def _divided(groups: Sequence[Cores], workers: Sequence[int]) -> Layout:
    each = zip(groups, workers, strict=True)
    return Layout(parts=tuple(part for group, count in each if count for part in divide_group(group, count)))


def divide_group(group: Cores, count: int) -> list[Cores]:
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
