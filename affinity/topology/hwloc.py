"""Read machines in hwloc's formats: lstopo's XML, and synthetic descriptions ("pack:2 core:24 pu:2")."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from xml.etree import ElementTree

from cputrain.affinity.errors import InputError
from cputrain.affinity.terminal import printable
from cputrain.affinity.topology.machine import (
    MAX_IDS,
    Core,
    Machine,
    NumaNode,
    format_list,
    missing_node_warnings,
    ordered_cores,
    parse_mask,
)
from cputrain.affinity.topology.memory import Sizes, on_package_gib, with_kinds, without_dram
from cputrain.affinity.topology.sysfs import ASSUMED, nearly_equal, relative_speeds, split_by_speed, work_per_clock
from cputrain.affinity.wording import GIB

# hwloc's kinds of memory -> ours; others (SPM) are unknown.
KINDS = {
    **{"DRAM": "dram", "MCDRAM": "hbm", "HBM": "hbm"},
    **{"NVM": "slow", "CXL-DRAM": "slow", "CXL-NVM": "slow", "GPUMemory": "slow"},
}
# Sizes of equal memories differ, as the kernel reserves a part of one.
EQUAL_SIZE_TOLERANCE = 0.1
# If several memories are next to the same PUs, the first in this order is in the PUs' NUMA node.
ORDER = {"dram": 0, "hbm": 1, "slow": 2}

Speeds = dict[int, float]
Kinds = list[tuple[tuple[int, ...], dict[str, str]]]  # PUs of a kind (one per core), and its attributes

MAX_FILE_BYTES = 1 << 26  # a host with 4,096 PUs needs a few MiB
MAX_LEVELS = 100  # depth of nested objects; real hosts have about thirty
REMEDY = "write it again with lstopo --of xml FILE"

NAMES = {
    **{"pack": "pack", "package": "pack", "socket": "pack", "die": "die", "numa": "numa", "numanode": "numa"},
    **{"node": "numa", "l3": "l3", "l3cache": "l3", "l2": "l2", "l2cache": "l2", "core": "core", "pu": "pu"},
}
# Levels that a plan does not use; they only multiply the levels inside, and `group` may be repeated.
OTHERS = re.compile(r"group\d*|cluster|l1[di]?(cache)?|l[45](cache)?|l[23]i(cache)?|memcache|memorysidecache")
TOKEN = re.compile(
    r"\s*(?:\[(?P<attached>numa|numanode|node)(?:\((?P<of>[^()]*)\))?\]|"
    r"(?P<kind>[a-z0-9]+):(?P<count>\d{1,6})(?:\((?P<attributes>[^()]*)\))?)(?=\s|\[|$)"
)
LOOPS = re.compile(r"[1-9]\d{0,5}\*[1-9]\d{0,5}(:[1-9]\d{0,5}\*[1-9]\d{0,5})*")
LISTED = re.compile(r"\d{1,6}(,\d{1,6})*")
SIZE = re.compile(r"(\d{1,18})(?:([KMGT])(I?B)?)?")
UNITS = {"B": 1000, "IB": 1024}  # kB and KiB, as in hwloc 2; K alone, which hwloc rejects, is KiB
IGNORED = ("size", "memorysidecachesize")

# Assumed memory of a NUMA node in a description without sizes: large, so that memory does not limit the number of
# workers (hwloc assumes 1 GiB).
ASSUMED_NODE_BYTES = 256 * GIB


def plain_number(text: str) -> int:
    """Parse a number of digits only. Raises ValueError on anything else, such as a sign, a blank, "nan"."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        raise ValueError(f"{text[:40]!r} is not a number")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryObject:
    """A NUMANode object of the file.

    `pus`: the PUs that it lists as next to it. `inside`: the PUs of the enclosing object. `gp_index`: its id in the
    file's memory attributes.
    """

    id: int
    gp_index: str | None
    memory_bytes: int
    subtype: str | None
    pus: tuple[int, ...]
    inside: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Bandwidth in MB/s and latency in ns of memories from their nearest PUs, by gp_index."""

    bandwidth: Mapping[str, int]
    latency: Mapping[str, int]


def figures_of(root: ElementTree.Element) -> Figures:
    """Read the file's memory attributes; empty if it has none. Raises ValueError if a value is not a number."""

    def values(*names: str) -> dict[str, list[int]]:
        values: dict[str, list[int]] = {}
        for table in root.findall("memattr"):
            if table.get("name") in names:
                for value in table.findall("memattr_value"):
                    values.setdefault(value.get("target_obj_gp_index", ""), []).append(
                        plain_number(value.get("value", ""))
                    )
        return values

    bandwidths = values("ReadBandwidth") or values("Bandwidth")
    latencies = values("ReadLatency") or values("Latency")
    return Figures(
        bandwidth={index: max(values) for index, values in bandwidths.items()},
        latency={index: min(values) for index, values in latencies.items()},
    )


def machine_nodes(
    memories: Sequence[MemoryObject], pus: tuple[int, ...], figures: Figures, *, on_package_gib: Sizes
) -> tuple[NumaNode, ...]:
    """Build the NUMA nodes by id.

    hwloc lists the PUs next to each memory, but a PU belongs to one NUMA node only: the memory with the fewest PUs next
    to it, DRAM before others. Raises ValueError if two nodes have the same id, if a node lists other PUs than its
    enclosing object, or if it is ambiguous to which node PUs belong.
    """
    every = frozenset(pus)
    owner: dict[int, int] = {}
    nodes: dict[int, NumaNode] = {}
    kinds = {memory.id: KINDS[memory.subtype] for memory in memories if memory.subtype in KINDS}
    for memory in sorted(memories, key=lambda m: (ORDER[kinds.get(m.id, "dram")], len(m.pus), m.id)):
        if memory.id in nodes:
            raise ValueError(f"NUMA node {memory.id} is listed twice")
        near = tuple(pu for pu in memory.pus if pu in every)
        if {*near} != every.intersection(memory.inside):
            listed, inside = format_list(memory.pus), format_list(memory.inside) or "none"
            raise ValueError(f"NUMA node {memory.id} lists CPUs {listed}, but its enclosing object has {inside}")
        unclaimed = () if any(pu in owner for pu in near) else near
        owner |= dict.fromkeys(unclaimed, memory.id)
        nodes[memory.id] = NumaNode(
            id=memory.id,
            pus=unclaimed,
            memory_bytes=memory.memory_bytes,
            near=(memory.id,) if unclaimed else tuple(sorted({owner[pu] for pu in near if pu in owner})),
            bandwidth_mb_s=figures.bandwidth.get(memory.gp_index or "") or None,
            latency_ns=figures.latency.get(memory.gp_index or "") or None,
        )
    by_id = tuple(nodes[i] for i in sorted(nodes))
    _refuse_ambiguous(with_kinds(by_id, kinds, on_package_gib=()))
    return with_kinds(by_id, kinds, on_package_gib=on_package_gib)


def _refuse_ambiguous(nodes: tuple[NumaNode, ...]) -> None:
    """Raise ValueError if nodes of equal size and unknown kind are next to the same PUs.

    lstopo without groups (--filter group:none) writes the nodes of a package like this, although each has only a part
    of the PUs.
    """
    by_id = {node.id: node for node in nodes}
    for node in nodes:
        owners = [by_id[i] for i in node.near if node.kind == "unknown" and node.memory_bytes]
        for owner in owners:
            if abs(node.memory_bytes - owner.memory_bytes) < EQUAL_SIZE_TOLERANCE * owner.memory_bytes:
                raise ValueError(
                    f"NUMA nodes {owner.id} and {node.id} list the same CPUs {format_list(owner.pus)} and equal "
                    "memory, as written by lstopo without groups"
                )


def core_types(root: ElementTree.Element, pus: tuple[int, ...], vendor: str | None) -> tuple[Speeds, tuple[str, ...]]:
    """Map PUs to the speed of their core's type, 1.0 for the fastest, and return warnings; empty if all cores are of
    one type.

    `pus` is one PU of each core. Sources, best first: Linux's capacities, clocks, names of the types, hwloc's ranks.
    """
    kinds = [(tuple(pu for pu in pus if pu in mask), infos) for mask, infos in map(_core_kind, root.findall("cpukind"))]
    kinds = [(members, infos) for members, infos in kinds if members]
    if len(kinds) < 2 or sorted(pu for members, _ in kinds for pu in members) != sorted(pus):
        return {}, ()
    for source in (_by_capacity, _by_clock(vendor), _by_name):
        speeds = source(kinds)
        if speeds is not None:
            return speeds, ()
    return _by_rank(kinds)


def _core_kind(element: ElementTree.Element) -> tuple[frozenset[int], dict[str, str]]:
    infos = {info.get("name", ""): info.get("value", "") for info in element.findall("info")}
    rank = element.get("forced_efficiency", element.get("efficiency"))
    return frozenset(parse_mask(element.get("cpuset", "0"))), infos if rank is None else {**infos, "rank": rank}


def _numbers(kinds: Kinds, name: str) -> Speeds:
    """Map PUs to a figure by name; empty unless all kinds have it."""
    values = {pu: float(plain_number(infos.get(name, "0"))) for members, infos in kinds for pu in members}
    return values if all(value > 0 for value in values.values()) else {}


def _by_capacity(kinds: Kinds) -> Speeds | None:
    values = _numbers(kinds, "LinuxCapacity")
    return relative_speeds(nearly_equal(values), values) if values else None


def _by_clock(vendor: str | None) -> Callable[[Kinds], Speeds | None]:
    def speeds(kinds: Kinds) -> Speeds | None:
        """Derive speeds from maximum clocks. Types are distinguished by name, else by base clock, which is the same for
        all cores of a type, while favored cores have a higher maximum. Intel's slow types do less work per clock."""
        clocks = _numbers(kinds, "FrequencyMaxMHz")
        if not clocks:
            return None
        types: dict[str, tuple[int, ...]] = {}
        for members, infos in kinds:
            name = infos.get("CoreType", "")
            types[name] = types.get(name, ()) + members
        if "" in types:
            groups = nearly_equal(_numbers(kinds, "FrequencyBaseMHz") or clocks)
            slow = tuple(pu for group in groups[:-1] for pu in group)
            types = {"IntelAtom": slow} if vendor == "GenuineIntel" else {}
        else:
            groups = split_by_speed(list(types.values()), clocks)
        return relative_speeds(groups, {pu: clock * work_per_clock(types, pu) for pu, clock in clocks.items()})

    return speeds


def _by_name(kinds: Kinds) -> Speeds | None:
    """Return the assumed speeds of Intel's core types."""
    if not all(infos.get("CoreType") in ASSUMED for _, infos in kinds):
        return None
    speeds = {pu: ASSUMED[infos["CoreType"]] for members, infos in kinds for pu in members}
    return {pu: speed / max(speeds.values()) for pu, speed in speeds.items()}


def _by_rank(kinds: Kinds) -> tuple[Speeds, tuple[str, ...]]:
    """Order types by hwloc's ranks, with the assumed speeds of Intel's types, as ranks have no speeds."""
    ranks = sorted({plain_number(infos.get("rank", "0")) for _, infos in kinds}, reverse=True)
    if len(ranks) < 2:
        return {}, ()
    steps = tuple(ASSUMED.values())
    speeds = {
        pu: steps[min(ranks.index(plain_number(infos.get("rank", "0"))), len(steps) - 1)]
        for members, infos in kinds
        for pu in members
    }
    shown = ", ".join(f"{speed:g}" for speed in sorted(set(speeds.values()), reverse=True))
    return speeds, (f"the XML ranks {len(ranks)} types of cores without their speeds: assumed {shown}",)


@dataclass(slots=True)
class _Found:
    """The objects found so far: cores, still without NUMA node and speed; memories; info attributes."""

    cores: list[Core] = field(default_factory=list)
    memories: list[MemoryObject] = field(default_factory=list)
    info: dict[str, str] = field(default_factory=dict)
    packages: int = 0


def read_lstopo(path: Path) -> Machine:
    """Read a file written by `lstopo --of xml`. Raises InputError if it is not such a file, or has no PU."""
    try:
        root = _parsed(path)
        top = root.find("object[@type='Machine']")
        if root.tag != "topology" or top is None:
            raise InputError(f"{path} is not lstopo's XML: write one with lstopo --of xml FILE")
        return _machine(root, top, path.name.split(".")[0])
    except (OSError, ElementTree.ParseError, LookupError, ValueError) as error:
        # LookupError: an encoding that is unknown to Python
        raise InputError(f"cannot read {path}: {error}; {REMEDY}") from None


def _parsed(path: Path) -> ElementTree.Element:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES >> 20} MiB")
    return ElementTree.fromstring(data)


def _machine(root: ElementTree.Element, top: ElementTree.Element, name: str) -> Machine:
    """Build the machine. Raises ValueError on objects that no host can have."""
    objects = _Found(info=_info(root))
    _walk(top, (), Core(pus=(), package=0, numa_node=None), objects)
    cores = _online_cores(objects.cores, top.get("online_cpuset"))
    if not cores:
        raise ValueError("it has no CPUs")
    pus = tuple(sorted(pu for core in cores for pu in core.pus))
    if len(set(pus)) < len(pus):
        raise ValueError(f"CPU {next(a for a, b in pairwise(pus) if a == b)} is in two cores")
    if "version" not in root.attrib:  # hwloc 1
        _check_nodes(objects.memories, _allowed(top, "nodeset"))
    if not objects.memories and "local_memory" in top.attrib:  # hwloc 1 of a host without NUMA
        objects.memories.append(replace(_memory(top, ()), id=0))
    model = printable(objects.info.get("CPUModel", "unknown model"))
    on_package = on_package_gib(objects.info.get("CPUFamilyNumber"), objects.info.get("CPUModelNumber"), model)
    nodes = machine_nodes(objects.memories, pus, figures_of(root), on_package_gib=on_package)
    cached = top.find(".//object[@type='MemCache']") is not None
    nodes, uncertain = without_dram(nodes, len({core.package for core in cores}), model, cached=cached)
    node_of = {pu: node.id for node in nodes for pu in node.pus}
    speeds, speed_warnings = core_types(root, tuple(core.pus[0] for core in cores), objects.info.get("CPUVendor"))
    cores_of_machine = ordered_cores(
        [replace(c, numa_node=node_of.get(c.pus[0]), speed=speeds.get(c.pus[0], 1.0)) for c in cores]
    )
    allowed, nodeset = (_allowed(top, attribute) for attribute in ("allowed_cpuset", "allowed_nodeset"))
    return Machine(
        name=printable(objects.info.get("HostName", name)),
        model=model,
        isa=(),  # not in lstopo's XML
        cores=cores_of_machine,
        numa_nodes=nodes,
        allowed_pus=tuple(pu for pu in pus if allowed is None or pu in allowed),
        allowed_nodes=tuple(node.id for node in nodes if nodeset is None or node.id in nodeset),
        warnings=(*speed_warnings, *uncertain, *missing_node_warnings(cores_of_machine)),
    )


def _walk(element: ElementTree.Element, around: tuple[ElementTree.Element, ...], core: Core, objects: _Found) -> None:
    """Collect objects from the outside in; `core` has the enclosing objects. A PU outside any core becomes a core."""
    if len(around) > MAX_LEVELS:
        raise ValueError(f"its objects are nested more than {MAX_LEVELS} levels deep")
    objects.info = {**_info(element), **objects.info}
    kind = _kind(element)
    match kind:
        case "Package":
            core = replace(core, package=_number(element, objects.packages))
            objects.packages += 1
        case "Die":
            core = replace(core, die=_number(element, 0))
        case "L3Cache":
            core = replace(core, l3=min(_pus_inside(element), default=None))
        case "L2Cache":
            core = replace(core, l2=min(_pus_inside(element), default=None))
        case "NUMANode":
            objects.memories.append(_memory(element, around))
        case "Core" | "PU":
            pus = _pus_inside(element)
            if not pus:
                raise ValueError(f"core {element.get('os_index', '')} has no CPUs")
            objects.cores.append(replace(core, pus=pus))
            return
    for child in element.findall("object"):
        _walk(child, (*around, element), core, objects)


def _kind(element: ElementTree.Element) -> str:
    """Return an object's type by hwloc 2's name; hwloc 1 has Socket, Node, and Cache with depth and cache_type."""
    kind = element.get("type", "")
    if kind == "Cache":
        instructions = element.get("cache_type") == "2"
        return f"L{element.get('depth')}{'i' if instructions else ''}Cache"
    return {"Socket": "Package", "Node": "NUMANode"}.get(kind, kind)


def _memory(element: ElementTree.Element, around: tuple[ElementTree.Element, ...]) -> MemoryObject:
    """Read a memory object, the PUs next to it, and the PUs in it or in the innermost enclosing object with PUs."""
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
    """Remove offline PUs, which hwloc 1 lists, too."""
    if online is None:
        return cores
    pus = {*parse_mask(online)}
    narrow = (replace(core, pus=tuple(pu for pu in core.pus if pu in pus)) for core in cores)
    return [core for core in narrow if core.pus]


def _check_nodes(memories: list[MemoryObject], listed: frozenset[int] | None) -> None:
    """Raise ValueError if a file of hwloc 1 names NUMA nodes that it does not describe.

    Its format has only one node around a set of PUs: next to a memory pool, lstopo drops the PUs' nodes.
    """
    described = {memory.id for memory in memories}
    if described and listed and (lost := listed - described):
        nodes = f"NUMA node{'s' if len(lost) > 1 else ''} {format_list(sorted(lost))}"
        raise ValueError(f"it names {nodes} without describing them, which hwloc 1's format cannot")


def _allowed(top: ElementTree.Element, attribute: str) -> frozenset[int] | None:
    """Read a set of allowed ids; None if there is no limit: without the attribute, or with hwloc's infinite mask."""
    mask = top.get(attribute)
    return None if mask is None or mask.startswith("0xf...f") else frozenset(parse_mask(mask))


def _number(element: ElementTree.Element, default: int | None) -> int:
    """Return the kernel's id of an object; if there is none, hwloc omits it or writes -1 as an unsigned number."""
    written = element.get("os_index")
    number = MAX_IDS if written is None else plain_number(written)
    if number < MAX_IDS:
        return number
    if default is None:
        raise ValueError(f"a {element.get('type')} has {'no number' if written is None else f'the number {written}'}")
    return default


def _info(element: ElementTree.Element) -> dict[str, str]:
    return {info.get("name", ""): info.get("value", "") for info in element.findall("info")}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    """Levels of a synthetic description.

    counts: (type, children per parent) from the outside in. node_level: level whose objects have the NUMA nodes, -1 for
    the whole host. memory_bytes: sizes of the nodes of one such object, which are consecutive in the numbering.
    indexes, node_indexes: numbering of the PUs and nodes.
    """

    counts: tuple[tuple[str, int], ...]
    node_level: int
    memory_bytes: tuple[int | None, ...]
    indexes: str | None
    node_indexes: str | None


def read_synthetic(
    text: str,
    *,
    name: str = "synthetic",
    model: str = "synthetic machine",
    isa: tuple[str, ...] = (),
    memory_bytes: int = ASSUMED_NODE_BYTES,
) -> Machine:
    """Build the machine that a synthetic description has: levels type:count from the outside in, nested in any order.

    Types are pack, die, numa, l3, l2, core (required) and pu (last), each at most once; hwloc's other types only
    multiply. `[numa]` after a level gives each of its objects a NUMA node, a second `[numa]` memory without PUs; by
    default each package is a node. pu and numa accept hwloc's numbering, as a list or as loops step*count from the
    innermost number out, `pu:2(indexes=2*48:1*2)`; numa accepts `(memory=64GB)` or GiB, default `memory_bytes`. Reads
    the output of `lstopo --of synthetic`. Raises InputError on any other text.
    """
    levels = _levels(text)
    counts = [count for _, count in levels.counts]
    core_levels = [kind for kind, _ in levels.counts].index("core") + 1
    smt, total = prod(counts[core_levels:]), prod(counts)
    if total > MAX_IDS:
        raise InputError(f"machine {text!r} has {total:,} PUs: describe a host with at most {MAX_IDS:,}")
    number = _numbering(levels.indexes, total, "PUs", text)
    node_ids = _node_ids(levels, text)
    groups: dict[tuple[str, int], list[int]] = {}
    positions = []
    for core in range(total // smt):
        pus = tuple(sorted(number[core * smt : (core + 1) * smt]))
        position = {}
        for depth in range(core_levels):
            kind, ordinal = levels.counts[depth][0], core // prod(counts[depth + 1 : core_levels])
            position[kind] = ordinal
            if depth == levels.node_level:
                position["numa"] = min(node_ids[ordinal])
        positions.append((pus, position))
        for key in position.items():
            groups.setdefault(key, []).extend(pus)
    dies_per_package = dict(levels.counts).get("die", 1)
    cores = [
        Core(
            pus=pus,
            package=position.get("pack", 0),
            numa_node=position.get("numa", min(node_ids[0])),
            die=position["die"] % dies_per_package if dies_per_package > 1 else None,
            l3=min(groups["l3", position["l3"]]) if "l3" in position else None,
            l2=min(groups["l2", position["l2"]]) if "l2" in position else None,
        )
        for pus, position in positions
    ]
    nodes = _nodes(cores, levels, node_ids, memory_bytes)
    return Machine(
        name=name,
        model=model,
        isa=isa,
        cores=ordered_cores(cores),
        numa_nodes=nodes,
        allowed_pus=tuple(sorted(number)),
        allowed_nodes=tuple(node.id for node in nodes),
    )


def _node_ids(levels: _Levels, text: str) -> list[tuple[int, ...]]:
    """Return the node ids of each object with nodes, consecutive as in hwloc; the lowest has the object's PUs."""
    objects, sizes_given = prod(count for _, count in levels.counts[: levels.node_level + 1]), len(levels.memory_bytes)
    number = _numbering(levels.node_indexes, objects * sizes_given, "NUMA nodes", text)
    return [number[i * sizes_given : (i + 1) * sizes_given] for i in range(objects)]


def _nodes(cores: list[Core], levels: _Levels, ids: list[tuple[int, ...]], memory_bytes: int) -> tuple[NumaNode, ...]:
    """Build the nodes by id; nodes without PUs are memory next to the PUs of their object."""
    pus: dict[int | None, list[int]] = {}
    for core in cores:
        pus.setdefault(core.numa_node, []).extend(core.pus)
    nodes = [
        NumaNode(
            id=node,
            pus=tuple(sorted(pus.get(node, ()))),
            memory_bytes=memory_bytes if size is None else size,
            memory_assumed=size is None,
            kind="dram" if node == min(together) else "unknown",
            near=(min(together),),
        )
        for together in ids
        for node, size in zip(together, levels.memory_bytes, strict=True)
    ]
    return tuple(sorted(nodes, key=lambda node: node.id))


def _levels(text: str) -> _Levels:
    counts: list[tuple[str, int]] = []
    sizes: list[int | None] = []
    indexes = node_level = node_indexes = None
    position, lowered = 0, text.lower().rstrip()
    while position < len(lowered):
        token = TOKEN.match(lowered, position)
        kind = token and (token["attached"] or token["kind"])
        kind = NAMES.get(kind) or (kind if OTHERS.fullmatch(kind) else None) if kind else None
        if token is None or kind is None or (token["count"] and not int(token["count"])):
            word = lowered[position:].split()[0]
            raise InputError(
                f"machine {text!r}: {word!r} is not {', '.join(dict.fromkeys(NAMES.values()))}:N or [numa]"
            )
        position = token.end()
        level = len(counts) - 1 if token["attached"] else len(counts)
        attributes = _attributes(token["of"] or token["attributes"] or "", kind, text)
        if not token["attached"]:
            _check_order(kind, dict(counts), text)
            counts.append((kind, int(token["count"])))
        if kind == "numa":
            if node_level not in (None, level):
                raise InputError(f"machine {text!r} has NUMA nodes at two levels: name one")
            node_level, node_indexes = level, attributes.get("indexes", node_indexes)
            sizes.append(_bytes(attributes["memory"], text) if "memory" in attributes else None)
        elif kind == "pu":
            indexes = attributes.get("indexes")
    if "core" not in dict(counts):
        raise InputError(f"machine {text!r} has no core:N level: add one, as in 'pack:2 core:24 pu:2'")
    if node_level is None:  # hwloc would give the whole host one NUMA node, unlike any host with several packages
        node_level = next((i for i, (kind, _) in enumerate(counts) if kind == "pack"), -1)
    return _Levels(
        counts=tuple(counts),
        node_level=node_level,
        memory_bytes=tuple(sizes) or (None,),
        indexes=indexes,
        node_indexes=node_indexes,
    )


def _check_order(kind: str, counts: dict[str, int], text: str) -> None:
    repeated = kind in counts and kind in NAMES.values()
    if repeated or "pu" in counts or (kind != "pu" and kind in NAMES.values() and "core" in counts):
        raise InputError(f"machine {text!r}: {kind} is out of order; write each level once, core and pu last")


def _attributes(written: str, kind: str, text: str) -> dict[str, str]:
    """Parse memory of numa and indexes of pu; ids of other objects and sizes of caches are ignored."""
    by_level = {}
    for pair in written.split():
        name, equals, value = pair.partition("=")
        if not equals or name not in ("memory", "indexes", *IGNORED) or (name == "memory" and kind != "numa"):
            raise InputError(f"machine {text!r}: {kind} takes no {name}; indexes belong to pu, memory to numa")
        by_level[name] = value
    return by_level


def _bytes(size: str, text: str) -> int:
    match = SIZE.fullmatch(size.upper())
    if match is None:
        raise InputError(f"machine {text!r}: memory={size} is not a size; write 64GB, for example")
    factor: int = UNITS[match.group(3) or "IB"] ** " KMGT".index(match.group(2) or " ")
    return int(match.group(1)) * factor


def _numbering(indexes: str | None, count: int, what: str, text: str) -> tuple[int, ...]:
    """Return the OS id of each object in logical order: a permutation of 0..count-1."""
    if indexes is None:
        return tuple(range(count))
    if LOOPS.fullmatch(indexes):
        loops = [tuple(map(int, loop.split("*"))) for loop in indexes.split(":")]
        innermost = min(step for step, _ in loops)
        numbers, stride = [0] * count, 1
        for step, length in (*loops, *([(1, innermost)] if innermost > 1 else [])):
            numbers = [number + logical // step % length * stride for logical, number in enumerate(numbers)]
            stride *= length
    elif LISTED.fullmatch(indexes):
        numbers = [int(number) for number in indexes.split(",")]
    else:
        raise InputError(f"machine {text!r}: indexes={indexes} is neither step*count:step*count... nor a list")
    if sorted(numbers) != list(range(count)):
        raise InputError(
            f"machine {text!r}: indexes={indexes} does not number its {count} {what} from 0 to {count - 1}"
        )
    return tuple(numbers)
