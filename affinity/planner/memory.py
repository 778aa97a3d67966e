"""Memory of each worker: policy, NUMA nodes, available bytes, and whether a batch fits."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated

from cputrain.affinity.errors import DoesNotFitError
from cputrain.affinity.planner.domains import Domain
from cputrain.affinity.planner.request import Reason, is_phi
from cputrain.affinity.planner.workload import (
    CUDA_BYTES,
    PEAK_OVER_KEPT,
    PROCESS_BYTES,
    Workload,
    footprint,
    largest_batch,
)
from cputrain.affinity.topology.machine import Machine, NumaNode, format_list, one_of
from cputrain.affinity.wording import GIB, numbers_text, plural

MemoryPolicy = Annotated[str, one_of("default", "bind", "preferred", "interleave")]
USABLE = 0.95
MEMORY_FIGURES = (
    Reason(
        what="memory of a process without a network",
        value=f"{PROCESS_BYTES / 1e9:g} GB",
        why="measured: Python with torch, oneDNN and the loader's batches 0.3-0.4 GB, Winograd's scratch 0.1 GB; "
        f"a CUDA build of torch, which pip installs on Linux, {CUDA_BYTES / 1e9:g} GB more if this host has one",
    ),
    Reason(
        what="peak memory / activations kept",
        value=f"{PEAK_OVER_KEPT:g}",
        why="measured with torch 2.13: ResNet-50 1.45 (4 to 32 images of 224 x 224), ResNet-18 1.6",
    ),
    Reason(
        what="usable share of memory",
        value=f"{USABLE:.0%}",
        why="assumed: the rest is for the kernel and the page cache of the images",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A worker's memory policy, its NUMA nodes, the bytes available to it, and the reason."""

    policy: MemoryPolicy
    nodes: tuple[int, ...]
    room_bytes: float
    reason: Reason


def peak_bytes(workload: Workload | None, batch: int | None) -> int | None:
    """Estimate a worker's peak memory in bytes; None if workload or batch are unknown."""
    return None if workload is None or batch is None else footprint(workload, batch).total


def place_memory(machine: Machine, domains: tuple[Domain, ...], needs: tuple[int | None, ...]) -> tuple[Memory, ...]:
    """Choose the memory of each worker; `needs` are their needs in bytes, None if unknown.

    A worker next to high-bandwidth memory is bound to it if its need fits, and prefers it otherwise. Memory without PUs
    is left out if it is slow or of unknown speed. Each byte is assigned to one worker.
    """
    memory = _memory_of(machine, domains)
    # Hundreds of workers differ in few ways, and a plan places the memory of dozens of layouts.
    cases = list(zip(memory.fast, memory.local, needs, strict=True))
    decided = {case: _decide(memory, machine, *case) for case in set(cases)}
    return tuple(decided[case] for case in cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostMemory:
    """Memory of the host.

    usable: nodes whose memory the process may use, by id. fast, local: for each worker, the nodes with HBM and with
    DRAM next to it. fast_users, local_users: for each of these nodes, the number of workers next to it. roaming: number
    of workers without DRAM next to them, which use memory anywhere. common: nodes with DRAM or with PUs, all nodes if
    there are none. spare: common nodes that are local to no worker. limit: each worker's part of the control group's
    limit, in bytes.
    """

    usable: Mapping[int, NumaNode]
    fast: tuple[tuple[int, ...], ...]
    local: tuple[tuple[int, ...], ...]
    fast_users: Mapping[int, int]
    local_users: Mapping[int, int]
    roaming: int
    common: tuple[int, ...]
    spare: tuple[int, ...]
    limit: float

    def part(self, node: int) -> float:
        """Bytes of a common node's memory for each worker next to it; roaming workers count in equal parts on all
        nodes."""
        users = self.local_users[node] + self.roaming / max(1, len(self.common))
        return self.usable[node].memory_bytes * USABLE / users

    def near_share(self, local: tuple[int, ...]) -> float:
        """A worker's part of the common memory next to it, or of all common memory if none is next to it."""
        if local:
            return sum(map(self.part, local))
        return sum(map(self.part, self.common)) / max(1, len(self.common)) if self.usable else inf

    def fast_share(self, fast: tuple[int, ...]) -> float:
        """A worker's part of the high-bandwidth memory next to it."""
        return sum(self.usable[node].memory_bytes * USABLE / self.fast_users[node] for node in fast)

    @property
    def spare_share(self) -> float:
        """A worker's part of the memory that is next to no worker."""
        spare = 0 if self.roaming else sum(self.usable[n].memory_bytes for n in self.spare)
        return spare * USABLE / len(self.local)


def _memory_of(machine: Machine, domains: tuple[Domain, ...]) -> _HostMemory:
    usable = {node.id: node for node in machine.numa_nodes if node.memory_bytes and node.id in machine.allowed_nodes}

    def near(nodes: frozenset[int | None]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Usable memory next to these nodes: with HBM, with DRAM."""
        nearby = [node for node in usable.values() if not nodes.isdisjoint(node.near)]
        fast = tuple(node.id for node in nearby if node.kind == "hbm" and not node.pus)
        return fast, tuple(node.id for node in nearby if node.kind == "dram" or node.pus)

    beside = [frozenset(core.numa_node for core in domain.cores) for domain in domains]
    by_nodes = {nodes: near(nodes) for nodes in set(beside)}
    fast, local = zip(*(by_nodes[nodes] for nodes in beside), strict=True)
    common = tuple(node.id for node in usable.values() if node.kind == "dram" or node.pus) or tuple(usable)
    local_users = Counter(node for nodes in local for node in nodes)
    return _HostMemory(
        usable=usable,
        fast=fast,
        local=local,
        fast_users=Counter(node for nodes in fast for node in nodes),
        local_users=local_users,
        roaming=sum(not nodes for nodes in local),
        common=common,
        spare=tuple(node for node in common if not local_users[node]),
        limit=inf if machine.memory_limit_bytes is None else machine.memory_limit_bytes / len(domains),
    )


def _decide(
    memory: _HostMemory, machine: Machine, fast: tuple[int, ...], local: tuple[int, ...], need: int | None
) -> Memory:
    """Choose a worker's memory by its need and the nodes next to it."""
    near_share, fast_share = memory.near_share(local), memory.fast_share(fast)

    def chosen(policy: MemoryPolicy, nodes: tuple[int, ...], room: float, why: str) -> Memory:
        text = numbers_text(why, need=need or 0, near=near_share, spare=format_list(memory.spare))
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
            "from NUMA nodes {spare}, which are next to no worker"
        )
        policy, nodes = ("preferred", local) if len(local) == 1 else ("interleave", tuple(sorted(local + memory.spare)))
        return chosen(policy, nodes, near_share + memory.spare_share, why)
    if len(local) == 1:
        return chosen("bind", local, near_share, "only the memory next to the worker")
    spans = len([node for node in local if memory.usable[node].pus]) > 1
    why = (
        "the worker spans NUMA nodes" if spans else "memory of equal speed next to the worker is in several NUMA nodes"
    )
    return chosen("interleave", local, near_share, f"{why}, so its pages alternate")


def _only_one(machine: Machine) -> str:
    if sum(node.memory_bytes > 0 for node in machine.numa_nodes) == 1:
        return "only one NUMA node has memory"
    return "the process may use the memory of one NUMA node only"


def _without_near(machine: Machine, memory: _HostMemory) -> str:
    if not any(node.memory_bytes for node in machine.numa_nodes):
        return "place and size of the memory are unknown; the kernel takes the nearest"
    if all(node.id in memory.usable for node in machine.numa_nodes if node.pus and node.memory_bytes):
        return "no memory is next to the worker; the kernel takes the nearest"
    return "the process may not use the memory next to the worker; the kernel takes the nearest"


def left_out_reasons(machine: Machine, domains: tuple[Domain, ...], memories: tuple[Memory, ...]) -> list[Reason]:
    """List the NUMA nodes without PUs that no worker uses, with the reason."""
    beside = {core.numa_node for domain in domains for core in domain.cores}
    used = {node for memory in memories for node in memory.nodes}
    left_out: dict[str, list[int]] = {}
    for node in machine.numa_nodes:
        if node.memory_bytes and not node.pus and node.id in machine.allowed_nodes and node.id not in used:
            left_out.setdefault(_why_left_out(node, beside), []).append(node.id)
    labels = {why: f"NUMA node{'s' if len(nodes) > 1 else ''} {format_list(nodes)}" for why, nodes in left_out.items()}
    return [Reason(what="memory left out", value=value, why=why) for why, value in labels.items() if why]


def _why_left_out(node: NumaNode, beside: set[int | None]) -> str:
    """Explain why no worker uses a node, "" for DRAM; `beside` are the nodes of the workers' cores."""
    if node.kind == "hbm" and beside.isdisjoint(node.near):
        return "high-bandwidth memory, but next to no worker"
    return {
        "slow": "slower than the DRAM next to the PUs",
        "unknown": "memory without PUs, of unknown speed",
        "hbm": "high-bandwidth memory in several NUMA nodes, next to a worker that may need more than all of it; only "
        "one node can be preferred to DRAM, so set {ppn} to at least the number of these nodes to use it",
        "dram": "",
    }[node.kind]


def memory_name(machine: Machine, policy: str, nodes: tuple[int, ...], pus: tuple[int, ...]) -> str:
    """Return the kind of memory of a worker: "DRAM", "HBM", on Xeon Phi "MCDRAM".

    "HBM + DRAM" with the policy preferred, by which memory overflows from HBM to DRAM.
    """
    used = [node for node in machine.numa_nodes if node.id in nodes]
    used = used or [node for node in machine.numa_nodes if node.memory_bytes and not {*pus}.isdisjoint(node.pus)]
    if not used or any(node.kind != "hbm" for node in used):
        return "DRAM"
    return ("MCDRAM" if is_phi(machine) else "HBM") + (" + DRAM" if policy == "preferred" else "")


def check_memory_fit(
    workload: Workload | None, batches: tuple[int | None, ...], memories: tuple[Memory, ...]
) -> tuple[str, ...]:
    """Return a warning if an assumed workload, or for an unknown one even a Python with torch, does not fit.

    Raises DoesNotFitError, with the largest batch that fits, if a known workload does not fit.
    """
    if workload is None:
        return _unknown_misfit(memories)
    for worker, (batch, memory) in enumerate(zip(batches, memories, strict=True)):
        peak = peak_bytes(workload, batch)
        if peak is None or peak <= memory.room_bytes:
            continue
        largest = largest_batch(workload, int(memory.room_bytes))
        misfit = (
            f"{workload.name} with {plural(batch or 0, 'image')} per step needs "
            f"{_needed_and_available(peak, worker, memory)}: {_remedy(workload, peak, memory, memories)}"
        )
        if not workload.assumed:
            raise DoesNotFitError(misfit, largest=largest)
        return (f"a typical training would not fit in memory, as {misfit}",)
    return ()


def _unknown_misfit(memories: tuple[Memory, ...]) -> tuple[str, ...]:
    tight = [worker for worker, memory in enumerate(memories) if memory.room_bytes < PROCESS_BYTES]
    if not tight:
        return ()
    fewer = len(memories) > 1 and sum(memory.room_bytes for memory in memories) >= PROCESS_BYTES
    remedy = "use fewer workers" if fewer else "give it more memory, or use another host"
    compared = _needed_and_available(PROCESS_BYTES, tight[0], memories[tight[0]])
    return (f"a training would not fit in memory, as a Python with torch alone needs {compared}: {remedy}",)


def _needed_and_available(need: int, worker: int, memory: Memory) -> str:
    """Write needed and available memory with enough digits to tell them apart."""
    digits = 1 if f"{need / GIB:.1f}" != f"{memory.room_bytes / GIB:.1f}" else 3
    return f"{need / GIB:.{digits}f} GiB; worker {worker} has {memory.room_bytes / GIB:.{digits}f} GiB"


def _remedy(workload: Workload, need: int, memory: Memory, memories: tuple[Memory, ...]) -> str:
    """Suggest a smaller batch if one fits, and fewer workers if one worker with the memory of all would fit."""
    largest, together = largest_batch(workload, int(memory.room_bytes)), sum(memory.room_bytes for memory in memories)
    fewer = len(memories) > 1 and need <= together
    if largest:
        return f"set {{local_batch}} to {largest} or fewer{' or use fewer workers' if fewer else ''}"
    if fewer:
        return "use fewer workers"
    alone = largest_batch(workload, int(together)) if len(memories) > 1 and together < inf else 0
    if alone:
        return f"use a single worker, with {{local_batch}} set to {alone} or fewer"
    return "train a smaller network or smaller crops, or use another host"
