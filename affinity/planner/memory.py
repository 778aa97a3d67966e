"""Which memory each worker uses, how much of it there is, and what a batch needs."""

from dataclasses import dataclass
from math import inf

from affinity.errors import DoesNotFitError
from affinity.planner.domains import Domain
from affinity.planner.profiles import is_phi
from affinity.planner.workload import Workload, footprint, largest_batch
from affinity.topology.machine import Machine
from affinity.units import GIB

USABLE = 0.95  # of a node's memory; the kernel and the page cache of the images keep some


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A worker's policy (default, bind, preferred, interleave), its NUMA nodes, the bytes it may count on, and why."""

    policy: str
    nodes: tuple[int, ...]
    room_bytes: float
    why: str


def need(workload: Workload | None, batch: int | None) -> int | None:
    """A worker's estimated peak in bytes; None where workload or batch are not known."""
    return None if workload is None or batch is None else footprint(workload, batch).total


def place(machine: Machine, domains: tuple[Domain, ...], needs: tuple[int | None, ...]) -> tuple[Memory, ...]:
    """Memory for each worker. `needs` is what each will use, in bytes, None where unknown.

    A worker with high-bandwidth memory of its own is bound to it where its need fits, and prefers it otherwise.
    """
    usable = {node.id: node for node in machine.numa_nodes if node.memory_bytes and node.id in machine.allowed_nodes}
    fast, local = [], []
    for domain in domains:
        own = {core.numa_node for core in domain.cores}
        near = [node for node in usable.values() if not own.isdisjoint(node.near)]
        fast.append(tuple(node.id for node in near if node.kind == "hbm" and not node.pus))
        local.append(tuple(node.id for node in near if node.kind == "dram" or node.pus))
    limit = inf if machine.memory_limit_bytes is None else machine.memory_limit_bytes / len(domains)

    def share(of: list[tuple[int, ...]], worker: int) -> float:
        """What a worker has of its nodes, each divided among those who use it."""
        return sum(usable[n].memory_bytes * USABLE / sum(n in nodes for nodes in of) for n in of[worker])

    def decide(worker: int) -> Memory:
        fast_share, near_share = share(fast, worker), share(local, worker)
        use = needs[worker]
        whole = sum(node.memory_bytes for node in usable.values()) * USABLE / len(domains)
        everywhere = inf if not usable else whole
        if fast[worker] and use is not None and use <= min(fast_share, limit):
            policy = "bind" if len(fast[worker]) == 1 else "interleave"
            why = f"high-bandwidth memory next to the worker: its {use / GIB:.1f} GiB fit there"
            return Memory(policy=policy, nodes=fast[worker], room_bytes=min(fast_share, limit), why=why)
        if len(fast[worker]) == 1:
            why = "high-bandwidth memory next to the worker; what does not fit goes to its DRAM"
            room = min(fast_share + near_share, limit)
            return Memory(policy="preferred", nodes=fast[worker], room_bytes=room, why=why)
        if len(usable) <= 1:
            why = "one NUMA node with memory: nothing to choose"
            return Memory(policy="default", nodes=(), room_bytes=min(everywhere, limit), why=why)
        if not local[worker]:
            why = "no memory next to the worker that it may use: the kernel takes the nearest"
            return Memory(policy="default", nodes=(), room_bytes=min(everywhere, limit), why=why)
        room = min(near_share, limit)
        if len(local[worker]) == 1:
            why = "the memory next to the worker and no other"
            return Memory(policy="bind", nodes=local[worker], room_bytes=room, why=why)
        why = "the worker spans NUMA nodes: its pages are spread over them"
        return Memory(policy="interleave", nodes=local[worker], room_bytes=room, why=why)

    return tuple(decide(worker) for worker in range(len(domains)))


def memory_name(machine: Machine, policy: str, nodes: tuple[int, ...], pus: tuple[int, ...]) -> str:
    """What memory a worker on these PUs uses under its policy: "DRAM", "HBM", on Xeon Phi "MCDRAM".

    "HBM + DRAM" where what does not fit in the fast memory goes to DRAM: policy preferred.
    """
    used = [node for node in machine.numa_nodes if node.id in nodes]
    used = used or [node for node in machine.numa_nodes if node.memory_bytes and not {*pus}.isdisjoint(node.pus)]
    if not used or any(node.kind != "hbm" for node in used):
        return "DRAM"
    return ("MCDRAM" if is_phi(machine) else "HBM") + (" + DRAM" if policy == "preferred" else "")


def check_fit(workload: Workload | None, batches: tuple[int | None, ...], memories: tuple[Memory, ...]) -> None:
    """Raise DoesNotFitError where a known workload does not fit, naming the largest batch that does."""
    if workload is None or workload.assumed:
        return
    for worker, (batch, memory) in enumerate(zip(batches, memories, strict=True)):
        peak = need(workload, batch)
        if peak is not None and peak > memory.room_bytes:
            most = largest_batch(workload, int(memory.room_bytes))
            raise DoesNotFitError(
                f"{workload.name} with {batch} images a step needs {peak / GIB:.1f} GiB; "
                f"worker {worker} has {memory.room_bytes / GIB:.1f} GiB: "
                + (f"set batch.local to {most} or fewer" if most else "use fewer workers"),
                largest=most,
            )


def batches_of(
    domains: tuple[Domain, ...], threads: tuple[int, ...], local_batch: int | None, *, proportional: bool
) -> tuple[int | None, ...]:
    """Images a step of each worker, local_batch on average, exactly local_batch x workers together.

    `proportional`: in proportion to what each worker's threads compute, at least 1, by largest remainders.
    """
    if local_batch is None or not proportional:
        return (local_batch,) * len(domains)
    speeds = [domain.cores[0].speed * count for domain, count in zip(domains, threads, strict=True)]
    total = local_batch * len(domains)
    exact = [total * speed / sum(speeds) for speed in speeds]
    batches = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (batches[i] - exact[i], i))
    for i in by_remainder[: max(0, total - sum(batches))]:
        batches[i] += 1
    while sum(batches) > total:
        batches[max(range(len(batches)), key=lambda i: (batches[i], -i))] -= 1
    return tuple(batches)
