"""hwloc's synthetic description of a machine ("pack:2 numa:1 core:24 pu:2") -> Machine."""

import re
from dataclasses import dataclass
from math import prod

from affinity.errors import InputError
from affinity.topology.cpuset import MOST_IDS
from affinity.topology.machine import Core, Machine, NumaNode, ordered

NAMES = {
    **{"pack": "pack", "package": "pack", "socket": "pack", "die": "die", "numa": "numa", "numanode": "numa"},
    **{"node": "numa", "l3": "l3", "l3cache": "l3", "l2": "l2", "l2cache": "l2", "core": "core", "pu": "pu"},
}
# Levels that a plan does not need; they only multiply the levels inside, and `group` may come several times.
OTHERS = re.compile(r"group\d*|cluster|l1[di]?(cache)?|l[45](cache)?|l[23]i(cache)?|memcache|memorysidecache")
TOKEN = re.compile(
    r"\s*(?:\[(?P<attached>numa|numanode|node)(?:\((?P<of>[^()]*)\))?\]|"
    r"(?P<kind>[a-z0-9]+):(?P<count>\d{1,6})(?:\((?P<attributes>[^()]*)\))?)(?=\s|\[|$)"
)
LOOPS = re.compile(r"[1-9]\d{0,5}\*[1-9]\d{0,5}(:[1-9]\d{0,5}\*[1-9]\d{0,5})*")
LISTED = re.compile(r"\d{1,6}(,\d{1,6})*")
SIZE = re.compile(r"(\d{1,18})(?:([KMGT])(I?B)?)?")
UNITS = {"B": 1000, "IB": 1024}  # kB and KiB, as hwloc 2 reads them; K alone, which it does not read, is KiB
IGNORED = ("size", "memorysidecachesize")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    """(type, children per parent) from the outside in; the level that has the NUMA nodes, -1 for the whole host; the
    sizes of the nodes of one of its objects; the PUs' and nodes' numbering.

    The nodes of one object have consecutive places in the numbering.
    """

    counts: tuple[tuple[str, int], ...]
    node_level: int
    memory_bytes: tuple[int | None, ...]
    indexes: str | None
    node_indexes: str | None


def read_synthetic(text: str, *, name: str, model: str, isa: tuple[str, ...], memory_bytes: int) -> Machine:
    """Build the machine that `text` describes: levels type:count from the outside in, nested in any order.

    Types are pack, die, numa, l3, l2, core and pu, each at most once, core always, pu last; others of hwloc's only
    multiply. `[numa]` after a level gives each of its objects a NUMA node, a second one memory without PUs; without
    either each package is one. Levels pu and numa take hwloc's numbering, a list or loops step*count from the innermost
    number out, `pu:2(indexes=2*48:1*2)`; numa takes `(memory=64GB)` or GiB, else a node has `memory_bytes`. Reads what
    `lstopo --of synthetic` writes. Raises InputError on any other text.
    """
    levels = _levels(text)
    counts = [count for _, count in levels.counts]
    core_levels = [kind for kind, _ in levels.counts].index("core") + 1
    smt, total = prod(counts[core_levels:]), prod(counts)
    if total > MOST_IDS:
        raise InputError(f"machine {text!r} has {total:,} PUs: no host has more than {MOST_IDS:,}")
    number = _numbering(levels.indexes, total, "PUs", text)
    node_ids = _node_ids(levels, text)
    shares: dict[tuple[str, int], list[int]] = {}
    places = []
    for core in range(total // smt):
        pus = tuple(sorted(number[core * smt : (core + 1) * smt]))
        place = {}
        for depth in range(core_levels):
            kind, ordinal = levels.counts[depth][0], core // prod(counts[depth + 1 : core_levels])
            place[kind] = ordinal
            if depth == levels.node_level:
                place["numa"] = min(node_ids[ordinal])
        places.append((pus, place))
        for key in place.items():
            shares.setdefault(key, []).extend(pus)
    dies_per_package = dict(levels.counts).get("die", 1)
    cores = [
        Core(
            pus=pus,
            package=place.get("pack", 0),
            numa_node=place.get("numa", min(node_ids[0])),
            die=place["die"] % dies_per_package if dies_per_package > 1 else None,
            l3=min(shares["l3", place["l3"]]) if "l3" in place else None,
            l2=min(shares["l2", place["l2"]]) if "l2" in place else None,
        )
        for pus, place in places
    ]
    nodes = _nodes(cores, levels, node_ids, memory_bytes)
    return Machine(
        name=name,
        model=model,
        isa=isa,
        cores=ordered(cores),
        numa_nodes=nodes,
        allowed_pus=tuple(sorted(number)),
        allowed_nodes=tuple(node.id for node in nodes),
    )


def _node_ids(levels: _Levels, text: str) -> list[tuple[int, ...]]:
    """The ids of the nodes of each object that has some, as hwloc numbers them: those of one object side by side. The
    node of the lowest number has the object's PUs."""
    objects, each = prod(count for _, count in levels.counts[: levels.node_level + 1]), len(levels.memory_bytes)
    number = _numbering(levels.node_indexes, objects * each, "NUMA nodes", text)
    return [number[i * each : (i + 1) * each] for i in range(objects)]


def _nodes(cores: list[Core], levels: _Levels, ids: list[tuple[int, ...]], memory_bytes: int) -> tuple[NumaNode, ...]:
    """By id; those without PUs are memory next to the PUs of their object."""
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
    if node_level is None:  # hwloc would give the whole host one NUMA node; no host of several packages is like that
        node_level = next((i for i, (kind, _) in enumerate(counts) if kind == "pack"), -1)
    return _Levels(
        counts=tuple(counts),
        node_level=node_level,
        memory_bytes=tuple(sizes) or (None,),
        indexes=indexes,
        node_indexes=node_indexes,
    )


def _check_order(kind: str, found: dict[str, int], text: str) -> None:
    repeated = kind in found and kind in NAMES.values()
    if repeated or "pu" in found or (kind != "pu" and kind in NAMES.values() and "core" in found):
        raise InputError(f"machine {text!r}: {kind} is out of order: each level once, core and pu last")


def _attributes(written: str, kind: str, text: str) -> dict[str, str]:
    """memory of numa, indexes of pu; the numbers of other objects and the sizes of caches are not needed."""
    found = {}
    for pair in written.split():
        name, equals, value = pair.partition("=")
        if not equals or name not in ("memory", "indexes", *IGNORED) or (name == "memory" and kind != "numa"):
            raise InputError(f"machine {text!r}: {kind} takes no {name}: indexes belong to pu, memory to numa")
        found[name] = value
    return found


def _bytes(size: str, text: str) -> int:
    match = SIZE.fullmatch(size.upper())
    if match is None:
        raise InputError(f"machine {text!r}: memory={size} is not a size: write 64GB")
    factor: int = UNITS[match.group(3) or "IB"] ** " KMGT".index(match.group(2) or " ")
    return int(match.group(1)) * factor


def _numbering(indexes: str | None, count: int, what: str, text: str) -> tuple[int, ...]:
    """OS number of each object in logical order; a permutation of 0..count-1."""
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
