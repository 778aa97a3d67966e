"""lstopo's XML, versions 2 and 3 -> Machine."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

from affinity.errors import InputError
from affinity.topology.cpuset import parse_mask
from affinity.topology.machine import Core, Machine, NumaNode, ordered
from affinity.topology.numa import XEON_PHI

FAST = ("MCDRAM", "HBM")


@dataclass(slots=True)
class _Found:
    """The objects found so far: cores, still without NUMA node and speed; NUMA nodes as elements; information."""

    cores: list[Core] = field(default_factory=list)
    nodes: list[ElementTree.Element] = field(default_factory=list)
    info: dict[str, str] = field(default_factory=dict)


def read_lstopo(path: Path) -> Machine:
    """Read a file written by `lstopo --of xml`. Raises InputError when it is not such a file, or has no PU."""
    try:
        root = ElementTree.parse(path).getroot()
        top = root.find("object[@type='Machine']")
        if root.tag != "topology" or top is None:
            raise InputError(f"{path} is not lstopo XML of version 2 or 3: write one with lstopo --of xml FILE")
        found = _Found()
        _walk(top, Core(pus=(), package=0, numa_node=None), found)
        allowed, nodeset = (parse_mask(top.get(name, "0")) for name in ("allowed_cpuset", "allowed_nodeset"))
        nodes = _nodes(found)
        speeds = _speeds(root)
    except (OSError, ElementTree.ParseError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if not found.cores:
        raise InputError(f"{path} has no CPUs: write it with lstopo --of xml FILE, unfiltered")
    node_of = {pu: node.id for node in nodes for pu in node.pus}
    return Machine(
        name=found.info.get("HostName", path.name.split(".")[0]),
        model=found.info.get("CPUModel", "unknown model"),
        isa=(),  # not in lstopo's XML
        cores=ordered(
            [replace(c, numa_node=node_of.get(c.pus[0]), speed=speeds.get(c.pus[0], 1.0)) for c in found.cores]
        ),
        numa_nodes=nodes,
        allowed_pus=tuple(sorted(pu for core in found.cores for pu in core.pus if pu in allowed)),
        allowed_nodes=tuple(node.id for node in nodes if node.id in nodeset),
    )


def _walk(element: ElementTree.Element, place: Core, found: _Found) -> None:
    """Collect from the outside in; `place` has the enclosing objects. A PU outside any core is a core of its own."""
    kind, number = element.get("type"), int(element.get("os_index", 0))
    for info in element.findall("info"):
        found.info.setdefault(info.get("name", ""), info.get("value", ""))
    match kind:
        case "Package":
            place = replace(place, package=number)
        case "Die":
            place = replace(place, die=number)
        case "L3Cache" | "L2Cache":
            lowest = min(parse_mask(element.get("cpuset", "0")), default=None)
            place = replace(place, l3=lowest) if kind == "L3Cache" else replace(place, l2=lowest)
        case "NUMANode":
            found.nodes.append(element)
        case "Core" | "PU":
            inside = [pu for pu in element.iter("object") if pu.get("type") == "PU"]
            found.cores.append(replace(place, pus=tuple(sorted(int(pu.get("os_index", 0)) for pu in inside))))
            return
    for child in element.findall("object"):
        _walk(child, place, found)


def _speeds(root: ElementTree.Element) -> dict[int, float]:
    """PU -> speed of its core's type, by the types' highest clocks; empty where all cores are of one type."""
    types = []
    for core_type in root.findall("cpukind"):
        info = {i.get("name"): i.get("value", "0") for i in core_type.findall("info")}
        types.append(
            (parse_mask(core_type.get("cpuset", "0")), core_type.get("efficiency"), int(info.get("FrequencyMaxMHz", 0)))
        )
    fastest = max((clock for _, _, clock in types), default=0)
    if len({efficiency for _, efficiency, _ in types}) < 2 or not all(clock for _, _, clock in types):
        return {}
    return {pu: clock / fastest for pus, _, clock in types for pu in pus}


def _nodes(found: _Found) -> tuple[NumaNode, ...]:
    """hwloc gives every memory the PUs next to it; only the first memory of a PU is its own NUMA node."""
    pus = {pu for core in found.cores for pu in core.pus}
    on_package = (found.info.get("CPUFamilyNumber"), found.info.get("CPUModelNumber")) in XEON_PHI
    owner: dict[int, int] = {}
    nodes = []
    for element in sorted(found.nodes, key=lambda e: (e.get("subtype") in FAST, int(e.get("os_index", 0)))):
        number = int(element.get("os_index", 0))
        near = tuple(pu for pu in parse_mask(element.get("cpuset", "0")) if pu in pus)
        own = () if any(pu in owner for pu in near) else near
        owner |= dict.fromkeys(own, number)
        fast = element.get("subtype") in FAST or (on_package and not own)
        nodes.append(
            NumaNode(
                id=number,
                pus=own,
                memory_bytes=int(element.get("local_memory", 0)),
                kind="dram" if own else "hbm" if fast else "slow",
                near=(number,) if own else tuple(sorted({owner[pu] for pu in near if pu in owner})),
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.id))
