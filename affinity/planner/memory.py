"""The memory that each worker uses: policy, NUMA nodes, room; and whether a batch fits."""

from dataclasses import dataclass
from math import inf

from affinity.errors import DoesNotFitError
from affinity.planner.domains import Domain
from affinity.planner.profiles import is_phi
from affinity.planner.reasons import Reason
from affinity.planner.workload import Workload, footprint, largest_batch
from affinity.topology.machine import Machine
from affinity.units import GIB

USABLE = 0.95  # of a node's memory; the kernel and the page cache of the images keep some


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A worker's policy (default, bind, preferred, interleave), its NUMA nodes, the bytes it may use, and why."""

    policy: str
    nodes: tuple[int, ...]
    room_bytes: float
    reason: Reason


def peak_bytes(workload: Workload | None, batch: int | None) -> int | None:
    """A worker's estimated peak memory; None where workload or batch are not known."""
    return None if workload is None or batch is None else footprint(workload, batch).total


def place_memory(machine: Machine, domains: tuple[Domain, ...], needs: tuple[int | None, ...]) -> tuple[Memory, ...]:
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
    everywhere = sum(node.memory_bytes for node in usable.values()) * USABLE / len(domains) if usable else inf

    def share(of: list[tuple[int, ...]], worker: int) -> float:
        """A worker's part of its nodes' memory, each node divided among those that use it."""
        return sum(usable[n].memory_bytes * USABLE / sum(n in nodes for nodes in of) for n in of[worker])

    def decide(worker: int) -> Memory:
        fast_share, near_share = share(fast, worker), share(local, worker)
        use = needs[worker]

        def chosen(policy: str, nodes: tuple[int, ...], room: float, why: str) -> Memory:
            reason = Reason(what="memory policy", value=policy, why=why)
            return Memory(policy=policy, nodes=nodes, room_bytes=min(room, limit), reason=reason)

        if fast[worker] and use is not None and use <= min(fast_share, limit):
            policy = "bind" if len(fast[worker]) == 1 else "interleave"
            why = f"high-bandwidth memory next to the worker holds all of its {use / GIB:.1f} GiB"
            return chosen(policy, fast[worker], fast_share, why)
        if len(fast[worker]) == 1:
            why = "high-bandwidth memory next to the worker; what does not fit goes to its DRAM"
            return chosen("preferred", fast[worker], fast_share + near_share, why)
        if len(usable) <= 1:
            return chosen("default", (), everywhere, "one NUMA node with memory: nothing to choose")
        if not local[worker]:
            why = "the process may use no memory next to the worker: the kernel takes the nearest"
            return chosen("default", (), everywhere, why)
        if len(local[worker]) == 1:
            return chosen("bind", local[worker], near_share, "only the memory next to the worker")
        return chosen("interleave", local[worker], near_share, "the worker spans NUMA nodes: its pages alternate")

    return tuple(decide(worker) for worker in range(len(domains)))


def memory_name(machine: Machine, policy: str, nodes: tuple[int, ...], pus: tuple[int, ...]) -> str:
    """The memory that a worker on these PUs uses under its policy: "DRAM", "HBM", on Xeon Phi "MCDRAM".

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
        peak = peak_bytes(workload, batch)
        if peak is not None and peak > memory.room_bytes:
            most = largest_batch(workload, int(memory.room_bytes))
            raise DoesNotFitError(
                f"{workload.name} with {batch} images per step needs {peak / GIB:.1f} GiB; "
                f"worker {worker} has {memory.room_bytes / GIB:.1f} GiB: "
                + (f"set {{local_batch}} to {most} or fewer" if most else "use fewer workers"),
                largest=most,
            )
