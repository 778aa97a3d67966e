"""NUMA nodes of a /sys tree: PUs, memory, how fast it is, nearest PUs."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from affinity.errors import InputError
from affinity.topology.cpuset import format_list
from affinity.topology.kernel_files import first_file, ids, number_if_any, numbered, numbers, text
from affinity.topology.machine import NumaNode
from affinity.topology.memory_kinds import Sizes, with_kinds

PusOf = Mapping[int, tuple[int, ...]]
# A host's only node has all of its memory. Guests that initialize theirs when it is first used count less in the node's
# own file, what they have touched so far; elsewhere both files agree but for rounding.
NEARLY_ALL = 0.95


def read_nodes(
    devices: Path, online: tuple[int, ...], *, on_package_gib: Sizes
) -> tuple[tuple[NumaNode, ...], tuple[str, ...]]:
    """The nodes under sys/devices, by id, and warnings; only online PUs count. Ids may have gaps, and exceed nine.

    `on_package_gib`: the sizes of this processor's nodes of HBM or MCDRAM, where the firmware has no speed of them.
    A kernel without NUMA has one node: all PUs, and the memory of proc/meminfo.
    """
    folders = numbered(devices / "system/node", "node")
    meminfo = devices.parents[1] / "proc/meminfo"
    if not folders:
        return (NumaNode(id=0, pus=online, memory_bytes=_memory_bytes(meminfo), near=(0,)),), ()
    folders = dict(sorted(folders.items()))
    listed = {i: _pus(folder, frozenset(online)) for i, folder in folders.items()}
    merged_into = overlapping(listed)
    pus = owners(listed, merged_into)
    tiers = _tiers(devices / "virtual/memory_tiering")
    nodes = tuple(
        _node(i, folders, pus, near=(merged_into[i],) if i in merged_into else None, tier=tiers.get(i)) for i in folders
    )
    nodes = with_kinds(nodes, {}, on_package_gib=on_package_gib)
    nodes = tuple(replace(node, kind="dram") if node.id in merged_into else node for node in nodes)
    if len(nodes) == 1 and nodes[0].pus == online:
        total = _memory_bytes(meminfo)
        nodes = (replace(nodes[0], memory_bytes=total),) if nodes[0].memory_bytes < NEARLY_ALL * total else nodes
    return nodes, overlap_warnings(merged_into)


def overlapping(listed: PusOf) -> dict[int, int]:
    """Node -> the lowest node that shares PUs with it, directly or through others, for each node that is not that one.

    A PU is in one node; firmware at fault, and numa=fake on the kernel's command line, list it in several.
    """
    found: list[tuple[set[int], set[int]]] = []
    for node, pus in listed.items():
        touching = [pair for pair in found if not pair[1].isdisjoint(pus)]
        found = [pair for pair in found if pair not in touching]
        found.append(({node}.union(*(n for n, _ in touching)), set(pus).union(*(p for _, p in touching))))
    return {node: min(nodes) for nodes, _ in found for node in nodes if node != min(nodes)}


def owners(listed: PusOf, merged_into: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Node -> its own PUs, each PU in one node: those of overlapping nodes belong to the lowest."""
    every = {i: {*pus} for i, pus in listed.items()}
    for node, lowest in merged_into.items():
        every[lowest] |= every[node]
        every[node] = set()
    return {i: tuple(sorted(pus)) for i, pus in every.items()}


def overlap_warnings(merged_into: Mapping[int, int]) -> tuple[str, ...]:
    """One warning for each set of nodes that were merged."""
    sets = {low: (low, *(n for n, into in merged_into.items() if into == low)) for low in set(merged_into.values())}
    return tuple(
        f"NUMA nodes {format_list(nodes)} list the same CPUs, a fault of the firmware or numa=fake: they count as one "
        "node with the memory of all"
        for _, nodes in sorted(sets.items())
    )


def _node(
    i: int, folders: Mapping[int, Path], pus: PusOf, *, near: tuple[int, ...] | None, tier: int | None
) -> NumaNode:
    initiators = _initiators(folders[i], pus)
    return NumaNode(
        id=i,
        pus=pus[i],
        memory_bytes=_memory_bytes(folders[i] / "meminfo"),
        near=near or ((i,) if pus[i] else _named_in(initiators, pus) or _nearest(i, folders, pus)),
        bandwidth_mb_s=_figure(initiators, "read_bandwidth"),
        latency_ns=_figure(initiators, "read_latency"),
        tier=tier,
    )


def _pus(folder: Path, online: frozenset[int]) -> tuple[int, ...]:
    path = first_file(folder, ("cpulist", "cpumap"))
    return () if path is None else tuple(pu for pu in ids(path) if pu in online)


def _memory_bytes(meminfo: Path) -> int:
    if not meminfo.is_file():
        return 0
    found = re.search(r"MemTotal:\s*([0-9]{1,15}) kB", text(meminfo))
    if found is None:
        raise InputError(f"{meminfo} has no line MemTotal: copy the tree again")
    return int(found.group(1)) * 1024


def _initiators(node: Path, pus: PusOf) -> Path | None:
    """The folder of the firmware's HMAT with the figures of the nearest PUs; None where it has none.

    access1 names initiators that are CPUs; access0 may name accelerators, and older kernels have it alone.
    """
    folders = (node / access / "initiators" for access in ("access1", "access0"))
    return next((folder for folder in folders if _named_in(folder, pus)), None)


def _named_in(initiators: Path | None, pus: PusOf) -> tuple[int, ...]:
    """The nodes with PUs among the initiators."""
    return () if initiators is None else tuple(sorted(i for i in numbered(initiators, "node") if pus.get(i)))


def _figure(initiators: Path | None, name: str) -> int | None:
    """MB/s or ns; None where the firmware gives none, which some kernels write as 0."""
    figure = None if initiators is None else number_if_any(initiators / name)
    return figure if figure is not None and figure > 0 else None


def _nearest(node: int, folders: Mapping[int, Path], pus: PusOf) -> tuple[int, ...]:
    """The nodes with PUs at the least distance from a memory-only node."""
    distance = folders[node] / "distance"
    values = numbers(distance) if distance.is_file() else ()
    to = {other: value for other, value in zip(folders, values, strict=False) if pus[other]}
    return tuple(other for other, value in to.items() if value == min(to.values()))


def _tiers(folder: Path) -> dict[int, int]:
    """Node -> the number of its memory tier; empty on kernels without tiers."""
    return {
        node: number
        for number, tier in numbered(folder, "memory_tier").items()
        if (tier / "nodelist").is_file()
        for node in ids(tier / "nodelist")
    }
