"""How many workers, threads, comm and loader cores, and why. Every rule answers with its reason."""

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from affinity.errors import InputError
from affinity.machine import Core, Machine, narrowed

T = TypeVar("T")

# The 256-node run gave one worker the 24 cores of a package; MLPerf v0.5 on 2 x 28 cores ran two workers a package.
MOST_CORES_PER_WORKER = 24
# On two cores, 2 workers x 1 thread train ResNet-50 1.2-1.35x faster than 1 x 2: one thread a worker scales best.
SMALL_NODE_CORES = 4
# Below this many cores a worker cannot spare one: communication and loading share the compute cores.
CORES_TO_SPARE_ONE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One decided number: what it is, its value as shown, and why."""

    what: str
    value: str
    why: str


def shares(items: tuple[T, ...], count: int) -> list[tuple[T, ...]]:
    """Cut items into count consecutive shares whose sizes differ by at most one."""
    cuts = [len(items) * i // count for i in range(count + 1)]
    return [items[a:b] for a, b in pairwise(cuts)]


def cores_by_node(machine: Machine) -> list[tuple[Core, ...]]:
    """The allowed cores of each NUMA node that has any, in the machine's order; nodeless cores form one group."""
    groups: dict[int | None, list[Core]] = {}
    for core in machine.allowed_cores:
        groups.setdefault(core.numa_node, []).append(core)
    return [tuple(group) for group in groups.values()]


def within_quota(machine: Machine) -> tuple[Machine, tuple[int, ...], list[Reason]]:
    """The machine without the cores that its CPU quota could not feed, their PUs, and why."""
    cores, quota = machine.allowed_cores, machine.cpu_quota
    if quota is None or max(1, int(quota)) >= len(cores):
        return machine, (), []
    kept = cores[: max(1, int(quota))]
    pus = frozenset(pu for core in kept for pu in core.pus)
    why = (
        f"control groups grant {quota:g} cores' worth of CPU time: more threads would be throttled, all of them at once"
    )
    reason = Reason(what="cores used", value=f"{len(kept)} of {len(cores)}", why=why)
    return narrowed(machine, pus, None), tuple(pu for pu in machine.allowed_pus if pu not in pus), [reason]


def workers_per_host(machine: Machine, asked: int | None) -> tuple[int, Reason]:
    """Workers on this host. Raises InputError when more are asked for than cores are lent."""
    groups = cores_by_node(machine)
    cores = sum(map(len, groups))
    if asked is not None:
        if asked > cores:
            raise InputError(
                f"ppn={asked} needs {asked} cores; host {machine.name} lends {cores}: set ppn to {cores} or fewer"
            )
        return asked, Reason(what="workers per host", value=str(asked), why="asked for")
    count = sum(_workers_in_node(len(group)) for group in groups)
    smallest, largest = min(map(len, groups)), max(map(len, groups))
    if largest <= SMALL_NODE_CORES:
        why = (
            f"one for each of {cores} cores: on nodes of {SMALL_NODE_CORES} cores or fewer, "
            "one thread a worker trains fastest (measured: 1.2-1.35x over one worker of two threads)"
        )
    elif count == len(groups):
        why = f"one for each NUMA node ({len(groups)} of them): no worker's memory is remote"
    else:
        size = str(largest) if smallest == largest else f"{smallest}-{largest}"
        why = (
            f"{len(groups)} NUMA node(s) of {size} cores, cut so that no worker "
            f"has more than {MOST_CORES_PER_WORKER} cores: several workers a node outrun one (published practice)"
        )
    return count, Reason(what="workers per host", value=str(count), why=why)


def _workers_in_node(cores: int) -> int:
    return cores if cores <= SMALL_NODE_CORES else -(-cores // MOST_CORES_PER_WORKER)


def domains(machine: Machine, ppn: int) -> tuple[list[tuple[Core, ...]], list[str]]:
    """Cut the allowed cores into ppn domains, and warn of what could not be helped.

    With at least as many workers as NUMA nodes no domain crosses a node: each node gets workers in proportion to its
    cores, at least one, so domains of unequal nodes may differ in size. With fewer, each domain is whole nodes where
    that cuts the nodes evenly, else an even share of the cores.
    """
    groups = cores_by_node(machine)
    if ppn < len(groups):
        spanning = [f"{ppn} worker(s) on {len(groups)} NUMA nodes: workers span nodes, part of their memory is remote"]
        if len(groups) % ppn == 0:
            return [tuple(core for group in share for core in group) for share in shares(tuple(groups), ppn)], spanning
        return shares(tuple(core for group in groups for core in group), ppn), spanning
    counts = [1] * len(groups)
    for _ in range(ppn - len(groups)):
        # Next worker where a worker has most cores; ppn <= cores guarantees that such a node has a core to spare.
        widest = max(range(len(groups)), key=lambda i: (len(groups[i]) / counts[i], -i))
        counts[widest] += 1
    cut = [domain for group, count in zip(groups, counts, strict=True) for domain in shares(group, count)]
    sizes = sorted({len(domain) for domain in cut})
    uneven = [f"domains of {sizes[0]} to {sizes[-1]} cores: the smallest sets the pace of each step"]
    return cut, uneven if len(sizes) > 1 else []


def comm_cores(domain_cores: int, nodes: int, asked: int | None) -> tuple[int, str]:
    """Cores of a domain kept for communication, and why."""
    if asked is not None:
        return asked, "asked for"
    if nodes == 1:
        return 0, "one host: adding up gradients over loopback costs a few percent of a step, less than a core would"
    if domain_cores < CORES_TO_SPARE_ONE:
        return 0, f"{domain_cores} cores: too few to keep one from computing"
    return 1, "several hosts: all-reduce progresses beside the backward pass, on a core of its own"


def loader_cores(domain_cores: int, asked: int | None) -> tuple[int, str]:
    """Cores of a domain kept for loading images, and why."""
    if asked is not None:
        return asked, "asked for"
    if domain_cores < CORES_TO_SPARE_ONE:
        return 0, f"{domain_cores} core(s): decoding costs below 3 % of a core here, so it shares the compute cores"
    return 1, "one core decodes several hundred images/s, more than the rest of the domain trains on"


def intra_op_threads(room: int, local_rank: int, asked: int | None, smt: bool) -> tuple[int, str]:
    """Compute threads of a worker with room for so many, and why. Raises InputError when more are asked for."""
    if asked is not None and asked > room:
        raise InputError(
            f"threads={asked}: worker {local_rank} has compute cores for {room}: set threads to {room} or fewer"
        )
    if asked is not None:
        return asked, "asked for"
    return room, f"one for each {'hardware thread' if smt else 'core'} of the domain that is left to compute"


def inter_op_threads(intra_op: int, asked: int | None) -> tuple[int, str]:
    """Threads across operators, and why."""
    if asked is not None:
        return asked, "asked for"
    if intra_op < CORES_TO_SPARE_ONE:
        return 1, "ResNet is a chain of operators: nothing to run side by side"
    return 2, "published practice on 24-core packages (intra-op 22, inter-op 2)"
