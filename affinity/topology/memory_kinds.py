"""Whether memory without PUs is as fast as that of the PUs next to it, faster (HBM, MCDRAM) or slower (CXL, NVM)."""

import re
from collections.abc import Mapping
from dataclasses import replace

from affinity.topology.machine import NumaNode

# HBM has at least twice the bandwidth of DRAM, CXL at most half and twice the latency; the firmware's figures of equal
# memories differ by a few percent.
BANDWIDTH_MARGIN = 1.2
LATENCY_MARGIN = 1.5
# CPU family and model of Knights Landing and Knights Mill, which have MCDRAM in their package.
XEON_PHI = (("6", "87"), ("6", "133"))
# Sapphire Rapids with HBM in its package: only its name differs from other models.
XEON_MAX = re.compile(r"Xeon ?\(R\) CPU Max", re.IGNORECASE)


def has_on_package_memory(family: str | None, number: str | None, model: str) -> bool:
    """Whether a processor of this family, model number and name has HBM or MCDRAM in its package."""
    return (family, number) in XEON_PHI or XEON_MAX.search(model) is not None


def with_kinds(
    nodes: tuple[NumaNode, ...], named: Mapping[int, str], *, on_package_memory: bool
) -> tuple[NumaNode, ...]:
    """The nodes with the kind of each that has no PUs.

    Decided by the first of these that is known and tells memories apart: "slow" in `named`, latency and bandwidth
    (HMAT), another kind in `named`, an HBM processor (`on_package_memory`), the kernel's tiers. Kernels before 6.8
    have all memory in one tier, and later ones put memory that a driver adds into a low one, so that tiers come last,
    and equal ones tell nothing.
    """
    return tuple(
        node if node.pus else replace(node, kind=_kind(node, nodes, named.get(node.id), on_package=on_package_memory))
        for node in nodes
    )


def _kind(node: NumaNode, nodes: tuple[NumaNode, ...], named: str | None, *, on_package: bool) -> str:
    if named == "slow":
        return named
    own = tuple(other for other in nodes if other.id in node.near and other.memory_bytes)
    if node.near and not own:
        return _beside_empty_nodes(node, nodes)
    by_hmat = _by_bandwidth_and_latency(node, own)
    if by_hmat or named:
        return by_hmat or named or "unknown"
    if on_package:
        return "hbm"
    tiers = [other.tier for other in own if other.tier is not None]
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
    """The nodes of the PUs next to it have no memory: the fastest memory next to them is their DRAM, but for that with
    a high latency."""
    rivals = [o for o in nodes if o.memory_bytes and not o.pus and set(o.near) & set(node.near)]
    least = min((other.latency_ns for other in rivals if other.latency_ns), default=0)
    quick = [other for other in rivals if (other.latency_ns or least) <= LATENCY_MARGIN * least]
    fastest = max((other.bandwidth_mb_s or 0 for other in quick), default=0)
    return "dram" if node in quick and (node.bandwidth_mb_s or 0) == fastest else "slow"
