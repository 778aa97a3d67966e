"""Bandwidth of the memory, counted as STREAM does (McCalpin 1995): by NUMA node, thread count and kernel.

Every thread is bound to a core and has arrays of its own, which it touches first. What a store reads before it writes
(write-allocate) is not counted.
"""

import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from affinity.errors import RunError
from affinity.kernel.mempolicy import set_memory_policy
from affinity.planner.measured import MEMORY
from affinity.planner.records import Record
from affinity.topology.machine import Core, Machine, NumaNode
from affinity.wording import counted
from cputrain.bench.figures import Figure, Report, figure_of
from cputrain.measurements import rate_record

GB = 1e9
STREAMS = {"copy": 2, "triad": 3}  # arrays that a kernel reads or writes
LEAST_BYTES, CACHES = 256 << 20, 4  # an array of all threads is as large, and four times the level-3 caches
PASSES = 4  # over the arrays in one measurement
TEST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Threads, by their PUs, and the NUMA node of each one's memory; None leaves it to the kernel."""

    name: str
    pus: tuple[int, ...]
    nodes: tuple[int | None, ...]


def bench_memory(machine: Machine, *, repeats: int, quick: bool) -> tuple[Report, tuple[Record, ...]]:
    """The bandwidth of each NUMA node by the number of its threads, from other nodes, and of the whole host."""
    array = TEST_BYTES if quick else max(LEAST_BYTES, CACHES * level3_bytes(machine))
    figures: list[Figure] = []
    for group in places(machine):
        most = group[-1]
        found = {
            (place, kernel): bandwidth(place, kernel, array // len(place.pus), repeats)
            for place in group
            for kernel in STREAMS
        }
        for (place, kernel), values in found.items():
            limit = None if place is most else median(found[most, kernel]) / GB
            named = "" if place is most else most.name
            in_gb = [value / GB for value in values]
            figures.append(figure_of(f"{place.name}, {kernel}", in_gb, "GB/s", limit=limit, limited_by=named))
    whole = bandwidth(host_place(machine), "triad", array // len(machine.allowed_cores), repeats)
    host = figure_of("host, triad", [value / GB for value in whole], "GB/s")
    record = rate_record(machine, MEMORY, figure_of("", whole, "").spread, command="cputrain bench memory")
    title = f"memory of {machine.name}: arrays of {array >> 20} MiB, medians of {counted(repeats, 'repeat')}"
    return Report(title=title, figures=(*figures, host)), (record,)


def places(machine: Machine) -> list[list[Place]]:
    """For each NUMA node with memory: 1, 2, 4, ... and all of the cores next to it; then the cores of other nodes."""
    nodes = [node for node in machine.numa_nodes if node.memory_bytes and node.id in machine.allowed_nodes]
    groups = []
    for node in nodes:
        near = cores_next_to(machine, node)
        if not near:
            continue
        bound = node.id if len(nodes) > 1 else None
        name = f"node {node.id}"
        own = [_place(f"{name}, {counted(count, 'thread')}", near[:count], bound) for count in thread_counts(len(near))]
        others = [
            _place(f"{name} from cores of node {other.id}", cores_next_to(machine, other), bound)
            for other in machine.numa_nodes
            if other.pus and other.id not in node.near and cores_next_to(machine, other)
        ]
        groups.append([*others, *own])
    return groups or [[_place("host", machine.allowed_cores, None)]]


def cores_next_to(machine: Machine, node: NumaNode) -> tuple[Core, ...]:
    """The cores that this process may use and that are nearest to a node's memory."""
    return tuple(core for core in machine.allowed_cores if core.numa_node in node.near)


def host_place(machine: Machine) -> Place:
    """A thread on every core, with memory next to it."""
    several = sum(bool(node.memory_bytes) for node in machine.numa_nodes) > 1
    cores = machine.allowed_cores
    nodes = {node.id for node in machine.numa_nodes if node.memory_bytes and node.id in machine.allowed_nodes}
    own = tuple(core.numa_node if several and core.numa_node in nodes else None for core in cores)
    return Place(name="host", pus=tuple(core.pus[0] for core in cores), nodes=own)


def _place(name: str, cores: Sequence[Core], node: int | None) -> Place:
    return Place(name=name, pus=tuple(core.pus[0] for core in cores), nodes=(node,) * len(cores))


def thread_counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({1 << k for k in range(most.bit_length()) if 1 << k < most} | {most})


def bandwidth(place: Place, kernel: str, array_bytes: int, repeats: int) -> list[float]:
    """bytes/s of all threads together, of each repeat; `array_bytes` are those of one thread's array.

    Raises RunError where the kernel refuses memory on a node.
    """
    barrier = threading.Barrier(len(place.pus))
    spans: list[list[tuple[float, float]]] = [[] for _ in place.pus]
    problems: list[str] = []

    def work(number: int) -> None:
        try:
            spans[number] = _timed_passes(place.pus[number], place.nodes[number], kernel, array_bytes, repeats, barrier)
        except (OSError, RunError, RuntimeError) as error:
            problems.append(str(error))
            barrier.abort()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        workers = [threading.Thread(target=work, args=(number,)) for number in range(len(place.pus))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        torch.set_num_threads(threads)
    if problems:
        raise RunError(f"bench memory: {place.name}: {problems[0]}")
    moved = PASSES * STREAMS[kernel] * array_bytes * len(place.pus)
    return [
        moved / (max(end for _, end in each) - min(start for start, _ in each)) for each in zip(*spans, strict=True)
    ]


def _timed_passes(
    pu: int, node: int | None, kernel: str, array_bytes: int, repeats: int, barrier: threading.Barrier
) -> list[tuple[float, float]]:
    """Start and end of each repeat, in a thread of its own."""
    os.sched_setaffinity(0, {pu})  # of this thread
    if node is not None and (why := set_memory_policy("bind", (node,))):
        raise RunError(f"memory on node {node} is refused: {why}")
    a, b, c = (torch.empty(array_bytes // 4).fill_(value) for value in (1.0, 2.0, 3.0))
    spans = []
    for _ in range(repeats + 1):
        barrier.wait()
        started = time.perf_counter()
        for _ in range(PASSES):
            if kernel == "copy":
                a.copy_(b)
            else:
                torch.add(b, c, alpha=3.0, out=a)
        spans.append((started, time.perf_counter()))
    return spans[1:]


def level3_bytes(machine: Machine, root: Path = Path("/")) -> int:
    """Bytes of all level-3 caches of the cores that this process may use; 0 where the kernel does not tell."""
    first = {core.l3: core.pus[0] for core in machine.allowed_cores if core.l3 is not None}
    files = [root / f"sys/devices/system/cpu/cpu{pu}/cache/index3/size" for pu in first.values()]
    return sum(_size(file.read_text(encoding="utf-8")) for file in files if file.is_file())


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]] if found else 0
