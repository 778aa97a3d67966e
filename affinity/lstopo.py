"""lstopo's XML, versions 2 and 3 -> Machine."""

from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from affinity.cpuset import parse_mask
from affinity.errors import InputError
from affinity.machine import Core, Machine, NumaNode, ordered
from affinity.numa import XEON_PHI

FAST = ("MCDRAM", "HBM")


@dataclass(slots=True)
class _Found:
    """What one walk through the objects collects; cores as (package, PUs), nodes as their elements."""

    cores: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    nodes: list[ElementTree.Element] = field(default_factory=list)
    info: dict[str, str] = field(default_factory=dict)


def read_lstopo(path: Path) -> Machine:
    """Read a file written by `lstopo --of xml`. Raises InputError when it is not one, or holds no PU."""
    try:
        root = ElementTree.parse(path).getroot()
        top = root.find("object[@type='Machine']")
        if root.tag != "topology" or top is None:
            raise InputError(f"{path} is no lstopo XML of version 2 or 3: write one with lstopo --of xml FILE")
        found = _Found()
        _walk(top, 0, found)
        allowed, nodeset = (parse_mask(top.get(name, "0")) for name in ("allowed_cpuset", "allowed_nodeset"))
        nodes = _nodes(found)
    except (OSError, ElementTree.ParseError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if not found.cores:
        raise InputError(f"{path} holds no PU: write it with lstopo --of xml FILE, unfiltered")
    node_of = {pu: node.id for node in nodes for pu in node.pus}
    return Machine(
        name=found.info.get("HostName", path.name.split(".")[0]),
        model=found.info.get("CPUModel", "unknown model"),
        isa=(),  # lstopo does not tell
        cores=ordered([Core(pus=pus, package=package, numa_node=node_of.get(pus[0])) for package, pus in found.cores]),
        numa_nodes=nodes,
        allowed_pus=tuple(sorted(pu for _, pus in found.cores for pu in pus if pu in allowed)),
        allowed_nodes=tuple(node.id for node in nodes if node.id in nodeset),
    )


def _walk(element: ElementTree.Element, package: int, found: _Found) -> None:
    """Collect from the outside in; a PU outside any core is a core of its own."""
    kind, number = element.get("type"), int(element.get("os_index", 0))
    for info in element.findall("info"):
        found.info.setdefault(info.get("name", ""), info.get("value", ""))
    if kind == "Package":
        package = number
    if kind == "NUMANode":
        found.nodes.append(element)
    if kind == "Core":
        found.cores.append((package, tuple(sorted(int(pu.get("os_index", 0)) for pu in element.iter() if _is_pu(pu)))))
        return
    if kind == "PU":
        found.cores.append((package, (number,)))
    for child in element.findall("object"):
        _walk(child, package, found)


def _is_pu(element: ElementTree.Element) -> bool:
    return element.get("type") == "PU"


def _nodes(found: _Found) -> tuple[NumaNode, ...]:
    """hwloc gives every memory the PUs next to it; only the first memory of a PU is its own NUMA node."""
    pus = {pu for _, core in found.cores for pu in core}
    on_package = (found.info.get("CPUFamilyNumber"), found.info.get("CPUModelNumber")) in XEON_PHI
    owner: dict[int, int] = {}
    nodes = []
    for element in sorted(found.nodes, key=lambda e: (e.get("subtype") in FAST, int(e.get("os_index", 0)))):
        number = int(element.get("os_index", 0))
        beside = tuple(pu for pu in parse_mask(element.get("cpuset", "0")) if pu in pus)
        own = () if any(pu in owner for pu in beside) else beside
        owner |= dict.fromkeys(own, number)
        fast = element.get("subtype") in FAST or (on_package and not own)
        nodes.append(
            NumaNode(
                id=number,
                pus=own,
                memory_bytes=int(element.get("local_memory", 0)),
                kind="dram" if own else "hbm" if fast else "slow",
                near=(number,) if own else tuple(sorted({owner[pu] for pu in beside if pu in owner})),
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.id))
