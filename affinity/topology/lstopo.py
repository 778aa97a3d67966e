"""lstopo's XML, of hwloc 1, 2 and 3 -> Machine."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

from affinity.errors import InputError
from affinity.terminal_text import printable
from affinity.topology.cpuset import MOST_IDS, format_list, parse_mask
from affinity.topology.lstopo_core_types import core_types
from affinity.topology.lstopo_nodes import MemoryObject, figures_of, machine_nodes
from affinity.topology.lstopo_numbers import plain_number
from affinity.topology.machine import Core, Machine, homeless_warnings, ordered
from affinity.topology.memory_kinds import on_package_gib, without_dram

MOST_BYTES = 1 << 26  # a host of 4,096 PUs takes a few MiB
MOST_LEVELS = 100  # objects inside objects: real hosts have some thirty
REMEDY = "write it again with lstopo --of xml FILE"


@dataclass(slots=True)
class _Found:
    """The objects found so far: cores, still without NUMA node and speed; memories; information."""

    cores: list[Core] = field(default_factory=list)
    memories: list[MemoryObject] = field(default_factory=list)
    info: dict[str, str] = field(default_factory=dict)
    packages: int = 0


def read_lstopo(path: Path) -> Machine:
    """Read a file written by `lstopo --of xml`. Raises InputError when it is not such a file, or has no PU."""
    try:
        root = _parsed(path)
        top = root.find("object[@type='Machine']")
        if root.tag != "topology" or top is None:
            raise InputError(f"{path} is not lstopo's XML: write one with lstopo --of xml FILE")
        return _machine(root, top, path.name.split(".")[0])
    except (OSError, ElementTree.ParseError, LookupError, ValueError) as error:
        # LookupError: an encoding that Python does not know
        raise InputError(f"cannot read {path}: {error}: {REMEDY}") from None


def _parsed(path: Path) -> ElementTree.Element:
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
    return ElementTree.fromstring(data)


def _machine(root: ElementTree.Element, top: ElementTree.Element, name: str) -> Machine:
    """Raises ValueError at objects that no host has."""
    found = _Found(info=_info(root))
    _walk(top, (), Core(pus=(), package=0, numa_node=None), found)
    cores = _online_cores(found.cores, top.get("online_cpuset"))
    if not cores:
        raise ValueError("it has no CPUs")
    pus = tuple(sorted(pu for core in cores for pu in core.pus))
    if len(set(pus)) < len(pus):
        raise ValueError(f"CPU {next(a for a, b in pairwise(pus) if a == b)} is in two cores")
    if "version" not in root.attrib:  # hwloc 1
        _check_nodes(found.memories, _allowed(top, "nodeset"))
    if not found.memories and "local_memory" in top.attrib:  # hwloc 1 of a host without NUMA
        found.memories.append(replace(_memory(top, ()), id=0))
    model = printable(found.info.get("CPUModel", "unknown model"))
    on_package = on_package_gib(found.info.get("CPUFamilyNumber"), found.info.get("CPUModelNumber"), model)
    nodes = machine_nodes(found.memories, pus, figures_of(root), on_package_gib=on_package)
    nodes = without_dram(nodes, len({core.package for core in cores}), model)
    node_of = {pu: node.id for node in nodes for pu in node.pus}
    speeds, speed_warnings = core_types(root, tuple(core.pus[0] for core in cores), found.info.get("CPUVendor"))
    made = ordered([replace(c, numa_node=node_of.get(c.pus[0]), speed=speeds.get(c.pus[0], 1.0)) for c in cores])
    allowed, nodeset = (_allowed(top, attribute) for attribute in ("allowed_cpuset", "allowed_nodeset"))
    return Machine(
        name=printable(found.info.get("HostName", name)),
        model=model,
        isa=(),  # not in lstopo's XML
        cores=made,
        numa_nodes=nodes,
        allowed_pus=tuple(pu for pu in pus if allowed is None or pu in allowed),
        allowed_nodes=tuple(node.id for node in nodes if nodeset is None or node.id in nodeset),
        warnings=(*speed_warnings, *homeless_warnings(made)),
    )


def _walk(element: ElementTree.Element, around: tuple[ElementTree.Element, ...], place: Core, found: _Found) -> None:
    """Collect from the outside in; `place` has the enclosing objects. A PU outside any core is a core of its own."""
    if len(around) > MOST_LEVELS:
        raise ValueError(f"it has objects inside objects, {MOST_LEVELS} levels deep")
    found.info = {**_info(element), **found.info}
    kind = _kind(element)
    match kind:
        case "Package":
            place = replace(place, package=_number(element, found.packages))
            found.packages += 1
        case "Die":
            place = replace(place, die=_number(element, 0))
        case "L3Cache":
            place = replace(place, l3=min(_pus_inside(element), default=None))
        case "L2Cache":
            place = replace(place, l2=min(_pus_inside(element), default=None))
        case "NUMANode":
            found.memories.append(_memory(element, around))
        case "Core" | "PU":
            pus = _pus_inside(element)
            if not pus:
                raise ValueError(f"core {element.get('os_index', '')} has no CPUs")
            found.cores.append(replace(place, pus=pus))
            return
    for child in element.findall("object"):
        _walk(child, (*around, element), place, found)


def _kind(element: ElementTree.Element) -> str:
    """An object's type by hwloc 2's names; hwloc 1 has Socket, Node, and Cache with its depth and cache_type."""
    kind = element.get("type", "")
    if kind == "Cache":
        instructions = element.get("cache_type") == "2"
        return f"L{element.get('depth')}{'i' if instructions else ''}Cache"
    return {"Socket": "Package", "Node": "NUMANode"}.get(kind, kind)


def _memory(element: ElementTree.Element, around: tuple[ElementTree.Element, ...]) -> MemoryObject:
    """With the PUs next to it, its own and those of the innermost object around it that has any."""
    inside = next(filter(None, map(_pus_inside, (element, *reversed(around)))), ())
    return MemoryObject(
        id=_number(element, None),
        gp_index=element.get("gp_index"),
        memory_bytes=plain_number(element.get("local_memory", "0")),
        subtype=element.get("subtype") or _info(element).get("Type"),
        pus=parse_mask(element.get("cpuset", "0")) or inside,
        inside=inside,
    )


def _pus_inside(element: ElementTree.Element) -> tuple[int, ...]:
    return tuple(sorted(_number(pu, None) for pu in element.iter("object") if pu.get("type") == "PU"))


def _online_cores(cores: list[Core], online: str | None) -> list[Core]:
    """Without the PUs that hwloc 1 lists although they are offline."""
    if online is None:
        return cores
    pus = {*parse_mask(online)}
    narrow = (replace(core, pus=tuple(pu for pu in core.pus if pu in pus)) for core in cores)
    return [core for core in narrow if core.pus]


def _check_nodes(memories: list[MemoryObject], named: frozenset[int] | None) -> None:
    """Raise ValueError where a file of hwloc 1 names NUMA nodes that it does not describe.

    Its format has one node around a set of PUs: lstopo drops the PUs' own nodes beside a pool of memory.
    """
    described = {memory.id for memory in memories}
    if described and named and (lost := named - described):
        nodes = f"NUMA node{'s' if len(lost) > 1 else ''} {format_list(sorted(lost))}"
        raise ValueError(f"it names {nodes} without describing them: hwloc 1's format cannot")


def _allowed(top: ElementTree.Element, attribute: str) -> frozenset[int] | None:
    """None where the file does not limit it: without the attribute, or with hwloc's mask of everything."""
    mask = top.get(attribute)
    return None if mask is None or mask.startswith("0xf...f") else frozenset(parse_mask(mask))


def _number(element: ElementTree.Element, default: int | None) -> int:
    """The kernel's number of an object; hwloc leaves it out, or writes -1 without its sign, where there is none."""
    written = element.get("os_index")
    number = MOST_IDS if written is None else plain_number(written)
    if number < MOST_IDS:
        return number
    if default is None:
        raise ValueError(f"a {element.get('type')} has {'no number' if written is None else f'the number {written}'}")
    return default


def _info(element: ElementTree.Element) -> dict[str, str]:
    return {info.get("name", ""): info.get("value", "") for info in element.findall("info")}
