"""Bandwidth of memory, and the optimizer beside it.

Every thread is bound to a core and has arrays of its own, which it touches first. What a store reads before it writes
(write-allocate) is not counted.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import nn

from cputrain.affinity.errors import RunError
from cputrain.affinity.kernel.binding import set_memory_policy
from cputrain.affinity.planner.records import Record
from cputrain.affinity.planner.request import MEMORY
from cputrain.affinity.topology.machine import Core, Machine, NumaNode
from cputrain.affinity.wording import counted
from cputrain.bench.figures import Figure, Report, figure_of, interleaved, number, spread_of
from cputrain.measurements import rate_record
from cputrain.models.networks import build_model
from cputrain.optim.build import build_optimizer, set_lr_and_decay
from cputrain.recipe.schema import ModelSection, OptimSection
from cputrain.simulate.network import optimizer_passes

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


OPTIMIZERS = ("momentum", "lars", "adam")
NETWORK, TEST_NETWORK = "resnet50", "lenet"
BYTES = 4


def bench_optimizer(machine: Machine, *, repeats: int, quick: bool) -> Report:
    """Steps of each optimizer, on one thread and on one for each core."""
    name = TEST_NETWORK if quick else NETWORK
    model = build_model(ModelSection(name=name), 1000, 64).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    size = BYTES * sum(parameter.numel() for parameter in model.parameters())
    before, figures = torch.get_num_threads(), []
    for threads in sorted({1, len(machine.allowed_cores)}):
        torch.set_num_threads(threads)
        figures += _figures(model, size, threads, repeats, quick=quick)
    torch.set_num_threads(before)
    title = f"optimizer steps on {name}'s {size / 1e6:.0f} MB of weights, {counted(repeats, 'repeat')}"
    return Report(title=title, figures=tuple(figures))


def _figures(model: nn.Module, size: int, threads: int, repeats: int, *, quick: bool) -> list[Figure]:
    runs: dict[str, Callable[[], float]] = {name: _step(model, name) for name in OPTIMIZERS}
    array = TEST_BYTES if quick else LEAST_BYTES
    found = interleaved({**runs, "triad": _triad(array)}, repeats)
    limit = STREAMS["triad"] * array / spread_of(found["triad"])[0] / GB
    return [
        figure_of(
            f"{name}, {counted(threads, 'thread')}",
            [optimizer_passes(name) * size / seconds / GB for seconds in found[name]],
            "GB/s",
            limit=limit,
            limited_by=f"triad, {counted(threads, 'thread')}",
            note=f"{number(1e3 * spread_of(found[name])[0])} ms",
        )
        for name in OPTIMIZERS
    ]


def _step(model: nn.Module, name: str) -> Callable[[], float]:
    optimizer = build_optimizer(model, OptimSection(name=name))  # type: ignore[arg-type]
    set_lr_and_decay(optimizer, 1e-4, 5e-5)
    return lambda: _seconds(optimizer.step)


def _triad(size: int) -> Callable[[], float]:
    a, b, c = (torch.full((size // BYTES,), value) for value in (1.0, 2.0, 3.0))
    return lambda: _seconds(lambda: torch.add(b, c, alpha=3.0, out=a))


def _seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started
