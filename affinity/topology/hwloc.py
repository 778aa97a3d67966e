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
SIZE = re.compile(r"(\d{1,18})([KMGT]?)I?B?")
IGNORED = ("size", "memorysidecachesize")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    """(type, children per parent) from the outside in; the level that has the NUMA nodes, -1 for the whole host; the
    sizes of the nodes of one of its objects, the first of which has the PUs; the PUs' and nodes' numbering."""

    counts: tuple[tuple[str, int], ...]
    node_level: int | None
    memory_bytes: tuple[int | None, ...]
    indexes: str | None
    node_indexes: str | None


def read_synthetic(text: str, *, name: str, model: str, isa: tuple[str, ...], memory_bytes: int) -> Machine:
    """Build the machine that `text` describes: levels type:count from the outside in, nested in any order.

    Types are pack, die, numa, l3, l2, core and pu, each at most once, core always, pu last; others of hwloc's only
    multiply. `[numa]` after a level gives each of its objects a NUMA node, a second one memory without PUs; without
    either each package is one. The PU level takes hwloc's numbering, a list or loops step*count from the innermost
    number out, `pu:2(indexes=2*48:1*2)`; numa takes `(memory=64GB)`, else a node has `memory_bytes`. Reads what
    `lstopo --of synthetic` writes. Raises InputError on any other text.
    """
    levels = _levels(text)
    counts = [count for _, count in levels.counts]
    core_levels = [kind for kind, _ in levels.counts].index("core") + 1
    smt, total = prod(counts[core_levels:]), prod(counts)
    if total > MOST_IDS:
        raise InputError(f"machine {text!r} has {total:,} PUs: no host has more than {MOST_IDS:,}")
    number = _numbering(levels.indexes, total, text)
    node_number = _numbering(levels.node_indexes, prod(counts[: (levels.node_level or 0) + 1]), text)
    shares: dict[tuple[str, int], list[int]] = {}
    places = []
    for core in range(total // smt):
        pus = tuple(sorted(number[core * smt : (core + 1) * smt]))
        place = {}
        for depth in range(core_levels):
            kind, ordinal = levels.counts[depth][0], core // prod(counts[depth + 1 : core_levels])
            place[kind] = ordinal
            if depth == levels.node_level:
                place["numa"] = node_number[ordinal]
        places.append((pus, place))
        for key in place.items():
            shares.setdefault(key, []).extend(pus)
    dies_per_package = dict(levels.counts).get("die", 1)
    cores = [
        Core(
            pus=pus,
            package=place.get("pack", 0),
            numa_node=place.get("numa", 0),
            die=place["die"] % dies_per_package if dies_per_package > 1 else None,
            l3=min(shares["l3", place["l3"]]) if "l3" in place else None,
            l2=min(shares["l2", place["l2"]]) if "l2" in place else None,
        )
        for pus, place in places
    ]
    nodes = _nodes(cores, levels, memory_bytes)
    return Machine(
        name=name,
        model=model,
        isa=isa,
        cores=ordered(cores),
        numa_nodes=nodes,
        allowed_pus=tuple(sorted(number)),
        allowed_nodes=tuple(node.id for node in nodes),
    )


def _nodes(cores: list[Core], levels: _Levels, memory_bytes: int) -> tuple[NumaNode, ...]:
    """Each node with PUs, then the memories without PUs next to each."""
    owners = sorted({core.numa_node for core in cores if core.numa_node is not None})
    sizes = levels.memory_bytes or (None,)
    return tuple(
        NumaNode(
            id=owner + i * len(owners),
            pus=tuple(sorted(pu for core in cores if core.numa_node == owner for pu in core.pus)) if i == 0 else (),
            memory_bytes=memory_bytes if size is None else size,
            memory_assumed=size is None,
            kind="dram" if i == 0 else "unknown",
            near=(owner,),
        )
        for i, size in enumerate(sizes)
        for owner in owners
    )


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
            node_level, node_indexes = level, attributes.get("indexes") if not sizes else None
            sizes.append(_bytes(attributes["memory"], text) if "memory" in attributes else None)
        elif kind == "pu":
            indexes = attributes.get("indexes")
    if "core" not in dict(counts):
        raise InputError(f"machine {text!r} has no core:N level: add one, as in 'pack:2 core:24 pu:2'")
    if node_level is None:  # hwloc would give the whole host one NUMA node; no host of several packages is like that
        node_level = next((i for i, (kind, _) in enumerate(counts) if kind == "pack"), None)
    return _Levels(
        counts=tuple(counts),
        node_level=node_level,
        memory_bytes=tuple(sizes),
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
    return int(match.group(1)) << " KMGT".index(match.group(2) or " ") * 10


def _numbering(indexes: str | None, pus: int, text: str) -> tuple[int, ...]:
    """OS number of each PU in logical order; a permutation of 0..pus-1."""
    if indexes is None:
        return tuple(range(pus))
    if LOOPS.fullmatch(indexes):
        loops = [tuple(map(int, loop.split("*"))) for loop in indexes.split(":")]
        innermost = min(step for step, _ in loops)
        numbers, stride = [0] * pus, 1
        for step, count in (*loops, *([(1, innermost)] if innermost > 1 else [])):
            numbers = [number + logical // step % count * stride for logical, number in enumerate(numbers)]
            stride *= count
    elif LISTED.fullmatch(indexes):
        numbers = [int(number) for number in indexes.split(",")]
    else:
        raise InputError(f"machine {text!r}: indexes={indexes} is neither step*count:step*count... nor a list")
    if sorted(numbers) != list(range(pus)):
        raise InputError(f"machine {text!r}: indexes={indexes} does not number its {pus} PUs from 0 to {pus - 1}")
    return tuple(numbers)
