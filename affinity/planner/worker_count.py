"""How many workers suit a host, where the user sets no ppn."""

from affinity.planner.core_groups import Cores, cores_by, uniform_groups

# The 256-node run gave one worker the 24 cores of a package; MLPerf v0.5 on 2 x 28 cores ran two workers a package.
MOST_CORES_PER_WORKER = 24
# On two cores, 2 workers x 1 thread train ResNet-50 1.2-1.35x faster than 1 x 2: one thread a worker scales best.
SMALL_NODE_CORES = 4


def workers_in(group: Cores) -> int:
    """Workers that suit the cores of one type in one NUMA node.

    The fewest that keep each at MOST_CORES_PER_WORKER or below; up to twice as many where only then all get the same
    number of cores, preferably in whole level-3 caches.
    """
    if len(group) <= SMALL_NODE_CORES:
        return len(group)
    fewest = -(-len(group) // MOST_CORES_PER_WORKER)
    caches = len(cores_by("l3", group))
    counts = range(fewest, 2 * fewest + 1)
    even = [n for n in counts if caches > 1 and caches % n == 0] or [n for n in counts if len(group) % n == 0]
    return even[0] if even else fewest


def why_so_many(cores: Cores, count: int) -> str:
    """Why the rules chose `count` workers for these cores."""
    groups = uniform_groups(cores)
    smallest, largest = min(map(len, groups)), max(map(len, groups))
    if largest <= SMALL_NODE_CORES:
        return (
            f"one for each of {len(cores)} cores: on NUMA nodes of {SMALL_NODE_CORES} cores or fewer, "
            "one thread per worker trains fastest (measured: 1.2-1.35x over one worker of two threads)"
        )
    if count == len(groups) and len({core.speed for core in cores}) > 1:
        return f"one for each core type in each NUMA node ({count} of them): no worker waits for slow cores of its own"
    if count == len(groups):
        return f"one for each NUMA node ({count} of them): no worker has remote memory"
    size = str(largest) if smallest == largest else f"{smallest}-{largest}"
    return (
        f"{len(groups)} NUMA node(s) of {size} cores, divided so that no worker has more than "
        f"{MOST_CORES_PER_WORKER} cores: several workers per node are faster than one (published practice)"
    )
