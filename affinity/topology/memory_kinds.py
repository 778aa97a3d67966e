"""Whether memory without PUs is as fast as that of the PUs next to it, faster (HBM, MCDRAM) or slower (CXL, NVM)."""

import re
from collections.abc import Mapping
from dataclasses import replace

from affinity.topology.machine import NumaNode
from affinity.units import GIB

# HBM has at least twice the bandwidth of DRAM, CXL at most half and twice the latency; the firmware's figures of equal
# memories differ by a few percent.
BANDWIDTH_MARGIN = 1.2
LATENCY_MARGIN = 1.5
Sizes = tuple[tuple[float, float], ...]  # from, to, in GiB
# CPU family and model of Knights Landing and Knights Mill, which have 16 GiB of MCDRAM in their package, all or a part
# of it memory, and take no other memory without PUs.
XEON_PHI = (("6", "87"), ("6", "133"))
PHI_GIB = ((0.0, 16.0),)
# Sapphire Rapids with 64 GiB of HBM in its package, in one, two or four nodes, of which firmware and kernel keep a
# little for themselves: only its name differs from other models.
XEON_MAX = re.compile(r"Xeon ?\(R\) CPU Max", re.IGNORECASE)
MAX_GIB = ((14.4, 16.0), (28.8, 32.0), (57.6, 64.0))


def on_package_gib(family: str | None, number: str | None, model: str) -> Sizes:
    """The sizes that a NUMA node of HBM or MCDRAM may have in a package of this processor; () without such memory."""
    if (family, number) in XEON_PHI:
        return PHI_GIB
    return MAX_GIB if XEON_MAX.search(model) else ()


def without_dram(nodes: tuple[NumaNode, ...], packages: int, model: str) -> tuple[NumaNode, ...]:
    """The nodes as HBM where they are all that a Xeon Max without DRAM has: 64 GiB in each package, next to PUs."""
    least, most = MAX_GIB[-1]
    each_gib = sum(node.memory_bytes for node in nodes) / GIB / packages
    if not XEON_MAX.search(model) or not all(node.pus for node in nodes) or not least <= each_gib <= most:
        return nodes
    return tuple(replace(node, kind="hbm") for node in nodes)


def with_kinds(nodes: tuple[NumaNode, ...], named: Mapping[int, str], *, on_package_gib: Sizes) -> tuple[NumaNode, ...]:
    """The nodes with the kind of each that has no PUs.

    Decided by the first of these that is known and tells memories apart: "slow" in `named`, latency and bandwidth
    (HMAT), another kind in `named`, the processor's own HBM (`on_package_gib`), the kernel's tiers. Kernels before 6.8
    have all memory in one tier, and later ones put memory that a driver adds into a low one, so that tiers come last,
    and equal ones tell nothing.
    """
    known = {node.id: "dram" if node.pus else _reported_kind(node, nodes, named.get(node.id)) for node in nodes}
    fits = {node.id for node in nodes if not known[node.id] and _is_of_size(node, on_package_gib)}

    def kind(node: NumaNode) -> str:
        rivals = [other for other in nodes if other.id != node.id and not {*other.near}.isdisjoint(node.near)]
        if node.id in fits and not any(known[rival.id] == "hbm" for rival in rivals):
            tiers = [rival.tier for rival in rivals if rival.id in fits]
            if all(tier is not None and node.tier is not None and node.tier < tier for tier in tiers):
                return "hbm"
        return known[node.id] or _by_tier(node, nodes)

    return tuple(node if node.pus else replace(node, kind=kind(node)) for node in nodes)


def _reported_kind(node: NumaNode, nodes: tuple[NumaNode, ...], named: str | None) -> str | None:
    """The kind by its name and figures; None where neither tells it."""
    if named == "slow":
        return named
    if node.near and not _own(node, nodes):
        return _beside_empty_nodes(node, nodes)
    return _by_bandwidth_and_latency(node, _own(node, nodes)) or named


def _own(node: NumaNode, nodes: tuple[NumaNode, ...]) -> tuple[NumaNode, ...]:
    """The memory of the PUs next to a node."""
    return tuple(other for other in nodes if other.id in node.near and other.memory_bytes)


def _is_of_size(node: NumaNode, sizes: Sizes) -> bool:
    return any(least <= node.memory_bytes / GIB <= most for least, most in sizes)


def _by_tier(node: NumaNode, nodes: tuple[NumaNode, ...]) -> str:
    tiers = [other.tier for other in _own(node, nodes) if other.tier is not None]
    if node.tier is None or not tiers or node.tier in tiers:
        return "unknown"
    return "hbm" if node.tier < min(tiers) else "slow"


def _by_bandwidth_and_latency(node: NumaNode, own: tuple[NumaNode, ...]) -> str | None:
    """None where neither tells the node from the memory of the PUs next to it, unless both have equal bandwidths.

    Pools of CXL memory have the bandwidth of many links together, and the latency of one: that goes first.
    """
    latencies = [other.latency_ns for other in own if other.latency_ns]
    if node.latency_ns and latencies and node.latency_ns > LATENCY_MARGIN * min(latencies):
        return "slow"
    bandwidths = [other.bandwidth_mb_s for other in own if other.bandwidth_mb_s]
    if not node.bandwidth_mb_s or not bandwidths:
        return None
    ratio = node.bandwidth_mb_s / max(bandwidths)
    if 1 / BANDWIDTH_MARGIN <= ratio <= BANDWIDTH_MARGIN:
        return "dram"
    return "hbm" if ratio > 1 else "slow"


def _beside_empty_nodes(node: NumaNode, nodes: tuple[NumaNode, ...]) -> str:
    """The nodes of the PUs next to it have no memory.

    Memory of a high latency is slow. Of the rest, where firmware has both figures of all, the slowest is DRAM and what
    is faster is HBM; elsewhere the fastest is DRAM.
    """
    rivals = [o for o in nodes if o.memory_bytes and not o.pus and set(o.near) & set(node.near)]
    least = min((other.latency_ns for other in rivals if other.latency_ns), default=0)
    quick = [other for other in rivals if (other.latency_ns or least) <= LATENCY_MARGIN * least]
    if node not in quick:
        return "slow"
    bandwidths = [other.bandwidth_mb_s or 0 for other in quick]
    own = node.bandwidth_mb_s or 0
    if all(bandwidths) and all(other.latency_ns for other in rivals):
        return "hbm" if own > BANDWIDTH_MARGIN * min(bandwidths) else "dram"
    return "dram" if own == max(bandwidths) else "slow"
