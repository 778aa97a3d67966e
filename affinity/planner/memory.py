"""The memory that each worker uses: policy, NUMA nodes, room; and whether a batch fits."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated

from cputrain.affinity.errors import DoesNotFitError
from cputrain.affinity.planner.domains import Domain
from cputrain.affinity.planner.request import PROCESS_BYTES, Reason, Workload, footprint, is_phi, largest_batch
from cputrain.affinity.topology.machine import Machine, NumaNode, format_list, one_of
from cputrain.affinity.wording import GIB, counted, formatted

MemoryPolicy = Annotated[str, one_of("default", "bind", "preferred", "interleave")]
USABLE = 0.95
MEMORY_FIGURES = (
    Reason(
        what="usable share of memory",
        value=f"{USABLE:.0%}",
        why="assumed: the kernel and the page cache of the images keep the rest",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A worker's policy, its NUMA nodes, the bytes it may use, and why."""

    policy: MemoryPolicy
    nodes: tuple[int, ...]
    room_bytes: float
    reason: Reason


def peak_bytes(workload: Workload | None, batch: int | None) -> int | None:
    """A worker's estimated peak memory; None where workload or batch are not known."""
    return None if workload is None or batch is None else footprint(workload, batch).total


def place_memory(machine: Machine, domains: tuple[Domain, ...], needs: tuple[int | None, ...]) -> tuple[Memory, ...]:
    """Memory for each worker. `needs` is what each will use, in bytes, None where unknown.

    A worker with high-bandwidth memory of its own is bound to it where its need fits, and prefers it otherwise. Memory
    without PUs that is slow, or of which nothing is known, is left out. Each byte counts for one worker.
    """
    memory = _memory_of(machine, domains)
    return tuple(_decide(memory, machine, worker, need) for worker, need in enumerate(needs))


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostMemory:
    """The nodes whose memory the process may use, by id; of each worker those with HBM and with DRAM next to it; the
    nodes of `common` memory, and those of them that are next to no worker. `limit` is each worker's part of the
    control group's."""

    usable: Mapping[int, NumaNode]
    fast: tuple[tuple[int, ...], ...]
    local: tuple[tuple[int, ...], ...]
    common: tuple[int, ...]
    spare: tuple[int, ...]
    limit: float

    @property
    def roaming(self) -> int:
        """Workers without memory next to them, which take it anywhere."""
        return sum(not nodes for nodes in self.local)

    def part(self, node: int) -> float:
        """The bytes of a node's common memory that a worker next to it gets. Roaming workers count in equal parts on
        every node."""
        users = sum(node in nodes for nodes in self.local) + self.roaming / max(1, len(self.common))
        return self.usable[node].memory_bytes * USABLE / users

    def near_share(self, worker: int) -> float:
        """A worker's part of the common memory next to it, or anywhere where it has none."""
        if self.local[worker]:
            return sum(map(self.part, self.local[worker]))
        return sum(map(self.part, self.common)) / max(1, len(self.common)) if self.usable else inf

    def fast_share(self, worker: int) -> float:
        """A worker's part of the high-bandwidth memory next to it."""
        return sum(
            self.usable[n].memory_bytes * USABLE / sum(n in nodes for nodes in self.fast) for n in self.fast[worker]
        )

    @property
    def spare_share(self) -> float:
        """A worker's part of the memory that is next to no worker."""
        spare = 0 if self.roaming else sum(self.usable[n].memory_bytes for n in self.spare)
        return spare * USABLE / len(self.local)


def _memory_of(machine: Machine, domains: tuple[Domain, ...]) -> _HostMemory:
    usable = {node.id: node for node in machine.numa_nodes if node.memory_bytes and node.id in machine.allowed_nodes}
    fast, local = [], []
    for domain in domains:
        own = {core.numa_node for core in domain.cores}
        near = [node for node in usable.values() if not own.isdisjoint(node.near)]
        fast.append(tuple(node.id for node in near if node.kind == "hbm" and not node.pus))
        local.append(tuple(node.id for node in near if node.kind == "dram" or node.pus))
    common = tuple(node.id for node in usable.values() if node.kind == "dram" or node.pus) or tuple(usable)
    return _HostMemory(
        usable=usable,
        fast=tuple(fast),
        local=tuple(local),
        common=common,
        spare=tuple(node for node in common if not any(node in nodes for nodes in local)),
        limit=inf if machine.memory_limit_bytes is None else machine.memory_limit_bytes / len(domains),
    )


def _decide(memory: _HostMemory, machine: Machine, worker: int, need: int | None) -> Memory:
    """A worker's memory, from what it needs and what is next to it."""
    fast, local = memory.fast[worker], memory.local[worker]
    near_share, fast_share = memory.near_share(worker), memory.fast_share(worker)

    def chosen(policy: MemoryPolicy, nodes: tuple[int, ...], room: float, why: str) -> Memory:
        text = formatted(why, need=need or 0, near=near_share, spare=format_list(memory.spare))
        reason = Reason(what="memory policy", value=policy, why=text)
        return Memory(policy=policy, nodes=nodes, room_bytes=min(room, memory.limit), reason=reason)

    if fast and need is not None and need <= min(fast_share, memory.limit):
        why = "high-bandwidth memory next to the worker holds all of its {need:GiB .1f} GiB"
        return chosen("bind" if len(fast) == 1 else "interleave", fast, fast_share, why)
    if len(fast) == 1:
        why = "high-bandwidth memory next to the worker; what does not fit goes to its DRAM"
        return chosen("preferred", fast, fast_share + near_share, why)
    if not local:
        return chosen("default", (), near_share, _without_near(machine, memory))
    if len(memory.usable) == 1:
        return chosen("default", (), near_share, _only_one(machine))
    if need is not None and near_share < need <= near_share + memory.spare_share:
        why = (
            "the memory next to the worker has {near:GiB .1f} of the {need:GiB .1f} GiB that it needs; the rest comes "
            "from NUMA nodes {spare}, next to no worker"
        )
        policy, nodes = ("preferred", local) if len(local) == 1 else ("interleave", tuple(sorted(local + memory.spare)))
        return chosen(policy, nodes, near_share + memory.spare_share, why)
    if len(local) == 1:
        return chosen("bind", local, near_share, "only the memory next to the worker")
    spans = len([node for node in local if memory.usable[node].pus]) > 1
    why = (
        "the worker spans NUMA nodes" if spans else "memory of equal speed next to the worker is in several NUMA nodes"
    )
    return chosen("interleave", local, near_share, f"{why}: its pages alternate")


def _only_one(machine: Machine) -> str:
    if sum(node.memory_bytes > 0 for node in machine.numa_nodes) == 1:
        return "one NUMA node with memory: nothing to choose"
    return "the process may use the memory of one NUMA node: nothing to choose"


def _without_near(machine: Machine, memory: _HostMemory) -> str:
    if not any(node.memory_bytes for node in machine.numa_nodes):
        return "where memory is, or how much, is not known: the kernel takes the nearest"
    if all(node.id in memory.usable for node in machine.numa_nodes if node.pus and node.memory_bytes):
        return "there is no memory next to the worker: the kernel takes the nearest"
    return "the process may use no memory next to the worker: the kernel takes the nearest"


def left_out_reasons(machine: Machine, domains: tuple[Domain, ...], memories: tuple[Memory, ...]) -> list[Reason]:
    """The memory without PUs that no worker uses, and why."""
    beside = {core.numa_node for domain in domains for core in domain.cores}
    used = {node for memory in memories for node in memory.nodes}
    left_out: dict[str, list[int]] = {}
    for node in machine.numa_nodes:
        if node.memory_bytes and not node.pus and node.id in machine.allowed_nodes and node.id not in used:
            left_out.setdefault(_why_left_out(node, beside), []).append(node.id)
    named = {why: f"NUMA node{'s' if len(nodes) > 1 else ''} {format_list(nodes)}" for why, nodes in left_out.items()}
    return [Reason(what="memory left out", value=value, why=why) for why, value in named.items() if why]


def _why_left_out(node: NumaNode, beside: set[int | None]) -> str:
    """Of a node that no worker uses; `beside` are the nodes of the workers' cores. Empty of DRAM without PUs."""
    if node.kind == "hbm" and beside.isdisjoint(node.near):
        return "high-bandwidth memory, but next to no worker"
    return {
        "slow": "slower than the DRAM next to the PUs: a worker's pages would wait for it",
        "unknown": "it has no PUs of its own, and its speed is not known",
        "hbm": "high-bandwidth memory in several NUMA nodes, next to a worker that may need more than all of it: only "
        "one node can be preferred to DRAM, so that more workers, of one node each ({ppn}), would use it",
        "dram": "",
    }[node.kind]


def memory_name(machine: Machine, policy: str, nodes: tuple[int, ...], pus: tuple[int, ...]) -> str:
    """The memory that a worker on these PUs uses under its policy: "DRAM", "HBM", on Xeon Phi "MCDRAM".

    "HBM + DRAM" where what does not fit in the fast memory goes to DRAM: policy preferred.
    """
    used = [node for node in machine.numa_nodes if node.id in nodes]
    used = used or [node for node in machine.numa_nodes if node.memory_bytes and not {*pus}.isdisjoint(node.pus)]
    if not used or any(node.kind != "hbm" for node in used):
        return "DRAM"
    return ("MCDRAM" if is_phi(machine) else "HBM") + (" + DRAM" if policy == "preferred" else "")


def check_fit(
    workload: Workload | None, batches: tuple[int | None, ...], memories: tuple[Memory, ...]
) -> tuple[str, ...]:
    """A warning where an assumed workload does not fit, or of an unknown one not even a Python with torch. Raises
    DoesNotFitError where a known one does not fit, naming the largest batch that does."""
    if workload is None:
        return _unknown_misfit(memories)
    for worker, (batch, memory) in enumerate(zip(batches, memories, strict=True)):
        peak = peak_bytes(workload, batch)
        if peak is None or peak <= memory.room_bytes:
            continue
        most = largest_batch(workload, int(memory.room_bytes))
        misfit = (
            f"{workload.name} with {counted(batch or 0, 'image')} per step needs "
            f"{_compared(peak, worker, memory)}: {_remedy(workload, peak, memory, memories)}"
        )
        if not workload.assumed:
            raise DoesNotFitError(misfit, largest=most)
        return (f"a typical training would not fit in memory: {misfit}",)
    return ()


def _unknown_misfit(memories: tuple[Memory, ...]) -> tuple[str, ...]:
    tight = [worker for worker, memory in enumerate(memories) if memory.room_bytes < PROCESS_BYTES]
    if not tight:
        return ()
    fewer = len(memories) > 1 and sum(memory.room_bytes for memory in memories) >= PROCESS_BYTES
    remedy = "use fewer workers" if fewer else "give it more memory, or use another host"
    compared = _compared(PROCESS_BYTES, tight[0], memories[tight[0]])
    return (f"a training would not fit in memory: a Python with torch alone needs {compared}: {remedy}",)


def _compared(need: int, worker: int, memory: Memory) -> str:
    """Both sizes, with as many digits as tell them apart."""
    digits = 1 if f"{need / GIB:.1f}" != f"{memory.room_bytes / GIB:.1f}" else 3
    return f"{need / GIB:.{digits}f} GiB; worker {worker} has {memory.room_bytes / GIB:.{digits}f} GiB"


def _remedy(workload: Workload, need: int, memory: Memory, memories: tuple[Memory, ...]) -> str:
    """Fewer workers where one with the memory of all would have what it needs, a smaller batch where that fits."""
    most, together = largest_batch(workload, int(memory.room_bytes)), sum(each.room_bytes for each in memories)
    fewer = len(memories) > 1 and need <= together
    if most:
        return f"set {{local_batch}} to {most} or fewer{' or use fewer workers' if fewer else ''}"
    if fewer:
        return "use fewer workers"
    alone = largest_batch(workload, int(together)) if len(memories) > 1 and together < inf else 0
    if alone:
        return f"use fewer workers, a single one with {{local_batch}} of {alone} or fewer"
    return "train a smaller network or smaller crops, or use another host"
