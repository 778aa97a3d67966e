"""The NUMA nodes of lstopo's XML: whose they are, how large and how fast."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from affinity.topology.cpuset import format_list
from affinity.topology.lstopo_numbers import plain_number
from affinity.topology.machine import NumaNode
from affinity.topology.memory_kinds import Sizes, with_kinds

# hwloc's names of kinds of memory -> ours; for others (SPM) nothing is known.
KINDS = {
    **{"DRAM": "dram", "MCDRAM": "hbm", "HBM": "hbm"},
    **{"NVM": "slow", "CXL-DRAM": "slow", "CXL-NVM": "slow", "GPUMemory": "slow"},
}
# The sizes of equal memories differ by what the kernel keeps for itself of one.
NEARLY_EQUAL = 0.1
# Where several memories are next to the same PUs, the first of these is the PUs' own.
ORDER = {"dram": 0, "hbm": 1, "slow": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryObject:
    """A NUMANode as written: `pus` are those that it lists as next to it, `inside` those of the object that it is in,
    `gp_index` its name in the file's tables of figures."""

    id: int
    gp_index: str | None
    memory_bytes: int
    subtype: str | None
    pus: tuple[int, ...]
    inside: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Bandwidth in MB/s and latency in ns of the memories, by gp_index, from the nearest PUs."""

    bandwidth: Mapping[str, int]
    latency: Mapping[str, int]


def figures_of(root: ElementTree.Element) -> Figures:
    """The file's memory attributes; empty where the host has none. Raises ValueError where one is not a number."""

    def values(*names: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for table in root.findall("memattr"):
            if table.get("name") in names:
                for value in table.findall("memattr_value"):
                    found.setdefault(value.get("target_obj_gp_index", ""), []).append(
                        plain_number(value.get("value", ""))
                    )
        return found

    bandwidths = values("ReadBandwidth") or values("Bandwidth")
    latencies = values("ReadLatency") or values("Latency")
    return Figures(
        bandwidth={index: max(found) for index, found in bandwidths.items()},
        latency={index: min(found) for index, found in latencies.items()},
    )


def machine_nodes(
    memories: Sequence[MemoryObject], pus: tuple[int, ...], figures: Figures, *, on_package_gib: Sizes
) -> tuple[NumaNode, ...]:
    """The nodes by id.

    hwloc gives every memory the PUs next to it; only one memory of a PU is its own NUMA node: that which has the fewest
    PUs next to it, DRAM before others. Raises ValueError where two nodes have the same number, where a node lists other
    PUs than the object that it is in, or where nothing tells which PUs are whose.
    """
    every = frozenset(pus)
    owner: dict[int, int] = {}
    nodes: dict[int, NumaNode] = {}
    kinds = {memory.id: KINDS[memory.subtype] for memory in memories if memory.subtype in KINDS}
    for memory in sorted(memories, key=lambda m: (ORDER[kinds.get(m.id, "dram")], len(m.pus), m.id)):
        if memory.id in nodes:
            raise ValueError(f"NUMA node {memory.id} is there twice")
        near = tuple(pu for pu in memory.pus if pu in every)
        if {*near} != every.intersection(memory.inside):
            listed, inside = format_list(memory.pus), format_list(memory.inside) or "none"
            raise ValueError(f"NUMA node {memory.id} lists CPUs {listed}, the object that it is in has {inside}")
        own = () if any(pu in owner for pu in near) else near
        owner |= dict.fromkeys(own, memory.id)
        nodes[memory.id] = NumaNode(
            id=memory.id,
            pus=own,
            memory_bytes=memory.memory_bytes,
            near=(memory.id,) if own else tuple(sorted({owner[pu] for pu in near if pu in owner})),
            bandwidth_mb_s=figures.bandwidth.get(memory.gp_index or "") or None,
            latency_ns=figures.latency.get(memory.gp_index or "") or None,
        )
    by_id = tuple(nodes[i] for i in sorted(nodes))
    _refuse_twins(with_kinds(by_id, kinds, on_package_gib=()))
    return with_kinds(by_id, kinds, on_package_gib=on_package_gib)


def _refuse_twins(nodes: tuple[NumaNode, ...]) -> None:
    """Raise ValueError where nodes of one size are next to the same PUs and nothing tells their kinds: lstopo without
    groups (--filter group:none) writes the nodes of a package so, each with a part of its PUs in truth."""
    by_id = {node.id: node for node in nodes}
    for node in nodes:
        owners = [by_id[i] for i in node.near if node.kind == "unknown" and node.memory_bytes]
        for own in owners:
            if abs(node.memory_bytes - own.memory_bytes) < NEARLY_EQUAL * own.memory_bytes:
                raise ValueError(
                    f"NUMA nodes {own.id} and {node.id} list the same CPUs {format_list(own.pus)} and equal memory, as "
                    "lstopo does without groups"
                )
