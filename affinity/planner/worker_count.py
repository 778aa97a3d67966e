"""How many workers suit a host, where the user sets no ppn: one decision for all of its cores, with its cost."""

from collections.abc import Callable
from dataclasses import dataclass

from affinity.planner.core_groups import Cores, memory_places, uniform_groups
from affinity.planner.layouts import Layout, best_layout, inside_nodes, nearly_fastest
from affinity.planner.reasons import Reason
from affinity.wording import counted, spread

MOST_CORES_PER_WORKER = 24
SMALL_HOST_CORES = 4
NEAR_EQUAL = 4 / 3
FIGURES = (
    Reason(
        what="cores per worker",
        value=f"at most {MOST_CORES_PER_WORKER}",
        why="published: SURFsara-Intel 2018, 256 hosts (24, a package), MLPerf v0.5 on 2 x 28 cores (14, half "
        "a package)",
    ),
    Reason(
        what="hosts with a worker per core",
        value=f"at most {SMALL_HOST_CORES} cores",
        why="measured on 2 cores: 2 x 1 thread train ResNet-50 1.2-1.35 times as fast as 1 x 2; larger hosts have no "
        "such measurement, and there each worker more costs memory and a rank in every all-reduce",
    ),
    Reason(
        what="near-equal workers",
        value=f"up to {NEAR_EQUAL:.2f} times the cores of the smallest",
        why="assumed: with equal batches, the others wait for the smallest",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLayout:
    """The layout of the workers that the rules chose, and why so many."""

    layout: Layout
    why: str


def choose_layout(
    cores: Cores, most: int | None, headroom: Callable[[Layout], float], *, proportional: bool
) -> ChosenLayout:
    """The layout that suits the cores and, if any does, the memory.

    Workers stay inside NUMA nodes and have at most MOST_CORES_PER_WORKER cores. Of the layouts that compute nearly
    the most: those with near-equal workers, then those that compute most, have whole level-3 caches, have the fewest
    workers. `headroom` is the least ratio of a worker's memory to its need; where the layout lacks memory, fewer
    workers have more. `most`: the most workers.
    """
    suited = _suited(cores, proportional=proportional)
    why = _why(cores, suited)
    if most is not None and most < len(suited.parts):
        suited = best_layout(cores, most, headroom, proportional=proportional)
        why = f"the batch and the images suffice for {counted(most, 'worker')} per host"
    if headroom(suited) >= 1:
        return ChosenLayout(layout=suited, why=why)
    fewer = [best_layout(cores, ppn, headroom, proportional=proportional) for ppn in range(len(suited.parts), 0, -1)]
    fitting = [layout for layout in fewer if headroom(layout) >= 1]
    wanted = counted(len(suited.parts), "worker")
    if fitting:
        chosen = max(fitting, key=lambda one: (one.pace(proportional=proportional), -one.across, -len(one.parts)))
        return ChosenLayout(layout=chosen, why=f"the memory is too small for the {wanted} that would suit the cores")
    chosen = max([suited, *fewer], key=headroom)
    return ChosenLayout(layout=chosen, why="no worker count fits in the memory; this one comes nearest")


def _suited(cores: Cores, *, proportional: bool) -> Layout:
    """The layout that suits the cores, whatever memory there is. A few cores have a worker each, except slow ones whose
    worker all others would wait for."""
    if len(cores) <= SMALL_HOST_CORES:
        fastest = [[core for core in cores if core.speed >= speed] for speed in {core.speed for core in cores}]
        single = [Layout(parts=tuple((core,) for core in kept)) for kept in fastest]
        return max(single, key=lambda one: (one.pace(proportional=proportional), len(one.parts)))
    groups = uniform_groups(cores)
    fewest = sum(-(-len(group) // MOST_CORES_PER_WORKER) for group in groups)
    every = [inside_nodes(groups, ppn) for ppn in range(1, min(2 * fewest, len(cores)) + 1)]
    layouts = [layout for layout in every if max(layout.sizes) <= MOST_CORES_PER_WORKER] or every  # of very slow cores
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
    """Whether no two workers share a level-3 cache."""
    each = [{core.l3 for core in part} for part in layout.parts]
    return sum(map(len, each)) == len(set().union(*each))


def _why(cores: Cores, layout: Layout) -> str:
    """Why the cores alone suggest these workers."""
    count, groups, places = len(layout.parts), uniform_groups(layout.used), memory_places(layout.used)
    nodes = len(places.nodes)
    if len(cores) == 1:
        return "one for the only core"
    if len(cores) <= SMALL_HOST_CORES:
        which = "each core" if count == len(cores) else f"each of the {count} fastest of {len(cores)} cores"
        return (
            f"one for {which}: with {SMALL_HOST_CORES} cores or fewer one thread per worker trains fastest "
            "(measured on two cores: 1.2-1.35x over one worker of two threads)"
        )
    if count == len(groups) == 1:
        some = "" if len(layout.used) == len(cores) else f"{len(layout.used)} of "
        return f"one for the host: {some}its {len(cores)} cores suit a single worker"
    if count == len(groups) == nodes:
        return f"one for each of {nodes} NUMA nodes: no worker spans two"
    if count == len(groups) == places.count:
        return f"one for each of {count} groups of cores ({places}): no worker spans two"
    if count == len(groups):
        return "one for each core type that computes in a NUMA node: no worker waits for slow cores of its own"
    sizes, each = spread([len(group) for group in groups], "core"), spread(layout.sizes, "core")
    where = "its cores are divided" if places.count == 1 else "no worker spans two"
    what = counted(nodes, "NUMA node") if len(groups) == nodes else f"{counted(len(groups), 'group')} of equal cores"
    return (
        f"{what} of {sizes}: {where}, workers have {each} each, and "
        f"{MOST_CORES_PER_WORKER} at most (published practice: several workers are faster than one)"
    )
