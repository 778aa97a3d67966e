"""Read NUMA nodes and their memory: size, kind (DRAM, HBM, CXL), nearest PUs."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.topology.kernel_files import (
    first_file,
    number_if_any,
    numbered_entries,
    read_ids,
    read_numbers,
    read_text,
)
from cputrain.affinity.topology.machine import NumaNode, format_list
from cputrain.affinity.wording import GIB

# HBM has at least twice the bandwidth of DRAM; CXL has at most half the bandwidth and twice the latency. The firmware's
# figures for equal memories differ by a few percent.
BANDWIDTH_MARGIN = 1.2
LATENCY_MARGIN = 1.5
Sizes = tuple[tuple[float, float], ...]  # from, to, in GiB
# CPU family and model of Knights Landing and Knights Mill: 16 GiB of MCDRAM in the package, all or part of which is
# memory (the rest cache), and no other memory without PUs.
XEON_PHI = (("6", "87"), ("6", "133"))
PHI_GIB = ((0.0, 16.0),)
# Sapphire Rapids with 64 GiB of HBM in the package, in one, two or four nodes, of which firmware and kernel reserve a
# little. Only its name distinguishes it from other models.
XEON_MAX = re.compile(r"Xeon ?\(R\) CPU Max", re.IGNORECASE)
MAX_GIB = ((14.4, 16.0), (28.8, 32.0), (57.6, 64.0))
UNCERTAIN_HBM = (
    "the firmware does not tell whether the 64 GiB of each package are HBM, or DRAM with HBM as its cache: they count "
    "as HBM"
)

PusOf = Mapping[int, tuple[int, ...]]
# A host's only node has all of its memory. In guests that initialize memory at first use, the node's file counts only
# the memory touched so far; elsewhere it agrees with /proc/meminfo except for rounding.
MIN_KNOWN_FRACTION = 0.95


def on_package_gib(family: str | None, number: str | None, model: str) -> Sizes:
    """Return the possible sizes of a NUMA node of HBM or MCDRAM of this processor; () if it has no such memory."""
    if (family, number) in XEON_PHI:
        return PHI_GIB
    return MAX_GIB if XEON_MAX.search(model) else ()


def without_dram(
    nodes: tuple[NumaNode, ...], packages: int, model: str, *, cached: bool
) -> tuple[tuple[NumaNode, ...], tuple[str, ...]]:
    """Mark the nodes of a Xeon Max without DRAM as HBM: 64 GiB per package, all next to PUs. Also return warnings.

    `cached`: memory has a memory-side cache, so it is DRAM, and HBM caches it. Firmware that reports neither such a
    cache nor the memory's bandwidth may just not report the cache: a warning says so.
    """
    low, high = MAX_GIB[-1]
    each_gib = sum(node.memory_bytes for node in nodes) / GIB / packages
    alone = all(node.pus for node in nodes) and low <= each_gib <= high
    if cached or not alone or not XEON_MAX.search(model):
        return nodes, ()
    all_hbm = tuple(replace(node, kind="hbm") for node in nodes)
    return all_hbm, () if all(node.bandwidth_mb_s for node in nodes) else (UNCERTAIN_HBM,)


def with_kinds(
    nodes: tuple[NumaNode, ...], reported: Mapping[int, str], *, on_package_gib: Sizes
) -> tuple[NumaNode, ...]:
    """Determine the kind of all nodes without PUs.

    By the first conclusive source: "slow" in `reported`, latency and bandwidth (HMAT), another kind in `reported`,
    sizes of the processor's HBM (`on_package_gib`), the kernel's tiers. Tiers come last, and equal tiers are ignored:
    kernels before 6.8 have all memory in one tier, and later ones put memory that a driver adds into a low tier.
    """
    kinds = {node.id: "dram" if node.pus else _reported_kind(node, nodes, reported.get(node.id)) for node in nodes}
    fits = {node.id for node in nodes if not kinds[node.id] and _is_of_size(node, on_package_gib)}

    def kind(node: NumaNode) -> str:
        rivals = [rival for rival in nodes if rival.id != node.id and not {*rival.near}.isdisjoint(node.near)]
        if node.id in fits and not any(kinds[rival.id] == "hbm" for rival in rivals):
            tiers = [rival.tier for rival in rivals if rival.id in fits]
            if all(tier is not None and node.tier is not None and node.tier < tier for tier in tiers):
                return "hbm"
        return kinds[node.id] or _by_tier(node, nodes)

    return tuple(node if node.pus else replace(node, kind=kind(node)) for node in nodes)


def _reported_kind(node: NumaNode, nodes: tuple[NumaNode, ...], reported: str | None) -> str | None:
    """Determine the kind by name, bandwidth and latency; None if they are inconclusive."""
    if reported == "slow":
        return reported
    if node.near and not _nearby(node, nodes):
        return _beside_empty_nodes(node, nodes)
    return _by_bandwidth_and_latency(node, _nearby(node, nodes)) or reported


def _nearby(node: NumaNode, nodes: tuple[NumaNode, ...]) -> tuple[NumaNode, ...]:
    """Return the nodes with memory among those whose PUs are next to a node."""
    return tuple(neighbor for neighbor in nodes if neighbor.id in node.near and neighbor.memory_bytes)


def _is_of_size(node: NumaNode, sizes: Sizes) -> bool:
    return any(low <= node.memory_bytes / GIB <= high for low, high in sizes)


def _by_tier(node: NumaNode, nodes: tuple[NumaNode, ...]) -> str:
    tiers = [neighbor.tier for neighbor in _nearby(node, nodes) if neighbor.tier is not None]
    if node.tier is None or not tiers or node.tier in tiers:
        return "unknown"
    return "hbm" if node.tier < min(tiers) else "slow"


def _by_bandwidth_and_latency(node: NumaNode, nearby: tuple[NumaNode, ...]) -> str | None:
    """Determine the kind by comparison with the memory of the PUs next to the node; None without figures.

    Latency first: pools of CXL memory have the bandwidth of many links together, but the latency of one.
    """
    latencies = [neighbor.latency_ns for neighbor in nearby if neighbor.latency_ns]
    if node.latency_ns and latencies and node.latency_ns > LATENCY_MARGIN * min(latencies):
        return "slow"
    bandwidths = [neighbor.bandwidth_mb_s for neighbor in nearby if neighbor.bandwidth_mb_s]
    if not node.bandwidth_mb_s or not bandwidths:
        return None
    ratio = node.bandwidth_mb_s / max(bandwidths)
    if 1 / BANDWIDTH_MARGIN <= ratio <= BANDWIDTH_MARGIN:
        return "dram"
    return "hbm" if ratio > 1 else "slow"


def _beside_empty_nodes(node: NumaNode, nodes: tuple[NumaNode, ...]) -> str:
    """Determine the kind of a node whose nearest PUs have no memory in their own nodes.

    Memory with high latency is slow. If the firmware has both figures for all nodes, the slowest of the others is DRAM
    and faster ones are HBM; else the fastest is DRAM.
    """
    rivals = [o for o in nodes if o.memory_bytes and not o.pus and set(o.near) & set(node.near)]
    shortest = min((rival.latency_ns for rival in rivals if rival.latency_ns), default=0)
    quick = [rival for rival in rivals if (rival.latency_ns or shortest) <= LATENCY_MARGIN * shortest]
    if node not in quick:
        return "slow"
    bandwidths = [rival.bandwidth_mb_s or 0 for rival in quick]
    bandwidth = node.bandwidth_mb_s or 0
    if all(bandwidths) and all(rival.latency_ns for rival in rivals):
        return "hbm" if bandwidth > BANDWIDTH_MARGIN * min(bandwidths) else "dram"
    return "dram" if bandwidth == max(bandwidths) else "slow"


def read_nodes(
    devices: Path, online: tuple[int, ...], *, on_package_gib: Sizes
) -> tuple[tuple[NumaNode, ...], tuple[str, ...]]:
    """Read the nodes under sys/devices, by id, with their online PUs, and warnings. Ids may have gaps.

    `on_package_gib`: sizes of this processor's nodes of HBM or MCDRAM, used if the firmware has no figures of them.
    A kernel without NUMA has one node with all PUs and the memory of proc/meminfo.
    """
    folders = numbered_entries(devices / "system/node", "node")
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
        nodes = (
            (replace(nodes[0], memory_bytes=total),) if nodes[0].memory_bytes < MIN_KNOWN_FRACTION * total else nodes
        )
    return nodes, overlap_warnings(merged_into)


def side_cached(devices: Path) -> bool:
    """Whether memory has a memory-side cache, as DRAM has if HBM or MCDRAM is its cache (HMAT; Linux 5.2)."""
    folders = numbered_entries(devices / "system/node", "node").values()
    return any(numbered_entries(folder / "memory_side_cache", "index") for folder in folders)


def overlapping(listed: PusOf) -> dict[int, int]:
    """Map nodes that share PUs, directly or through others, to the lowest of them, which itself is not a key.

    A PU is in one node, but buggy firmware, or numa=fake on the kernel's command line, may list it in several.
    """
    overlaps: list[tuple[set[int], set[int]]] = []
    for node, pus in listed.items():
        touching = [pair for pair in overlaps if not pair[1].isdisjoint(pus)]
        overlaps = [pair for pair in overlaps if pair not in touching]
        overlaps.append(({node}.union(*(n for n, _ in touching)), set(pus).union(*(p for _, p in touching))))
    return {node: min(nodes) for nodes, _ in overlaps for node in nodes if node != min(nodes)}


def owners(listed: PusOf, merged_into: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Map nodes to their PUs, each PU in one node; the PUs of overlapping nodes are assigned to the lowest."""
    every = {i: {*pus} for i, pus in listed.items()}
    for node, lowest in merged_into.items():
        every[lowest] |= every[node]
        every[node] = set()
    return {i: tuple(sorted(pus)) for i, pus in every.items()}


def overlap_warnings(merged_into: Mapping[int, int]) -> tuple[str, ...]:
    """Return a warning for each set of merged nodes."""
    sets = {low: (low, *(n for n, into in merged_into.items() if into == low)) for low in set(merged_into.values())}
    return tuple(
        f"NUMA nodes {format_list(nodes)} list the same CPUs, due to a firmware bug or numa=fake: they count as one "
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
    return () if path is None else tuple(pu for pu in read_ids(path) if pu in online)


def _memory_bytes(meminfo: Path) -> int:
    if not meminfo.is_file():
        return 0
    match = re.search(r"MemTotal:\s*([0-9]{1,15}) kB", read_text(meminfo))
    if match is None:
        raise InputError(f"{meminfo} has no line MemTotal: copy the tree again")
    return int(match.group(1)) * 1024


def _initiators(node: Path, pus: PusOf) -> Path | None:
    """Return the folder with HMAT figures for the nearest PUs; None if the firmware has none.

    access1 lists only CPUs as initiators; access0 may list accelerators, but older kernels have nothing else.
    """
    folders = (node / access / "initiators" for access in ("access1", "access0"))
    return next((folder for folder in folders if _named_in(folder, pus)), None)


def _named_in(initiators: Path | None, pus: PusOf) -> tuple[int, ...]:
    """Return the nodes with PUs among the initiators."""
    return () if initiators is None else tuple(sorted(i for i in numbered_entries(initiators, "node") if pus.get(i)))


def _figure(initiators: Path | None, name: str) -> int | None:
    """Read a figure in MB/s or ns; None if the firmware has none, which some kernels write as 0."""
    figure = None if initiators is None else number_if_any(initiators / name)
    return figure if figure is not None and figure > 0 else None


def _nearest(node: int, folders: Mapping[int, Path], pus: PusOf) -> tuple[int, ...]:
    """Return the nodes with PUs that are nearest to a memory-only node."""
    distance = folders[node] / "distance"
    values = read_numbers(distance) if distance.is_file() else ()
    to = {target: value for target, value in zip(folders, values, strict=False) if pus[target]}
    return tuple(target for target, value in to.items() if value == min(to.values()))


def _tiers(folder: Path) -> dict[int, int]:
    """Map nodes to their memory tier; empty on kernels without tiers."""
    return {
        node: number
        for number, tier in numbered_entries(folder, "memory_tier").items()
        if (tier / "nodelist").is_file()
        for node in read_ids(tier / "nodelist")
    }
