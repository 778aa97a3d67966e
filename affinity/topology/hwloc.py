"""hwloc's synthetic description of a machine ("pack:2 numa:1 core:24 pu:2") -> Machine."""

import re
from dataclasses import dataclass
from math import prod

from affinity.errors import InputError
from affinity.topology.machine import Core, Machine, NumaNode, ordered

NAMES = {
    **{"pack": "pack", "package": "pack", "socket": "pack", "die": "die", "numa": "numa", "numanode": "numa"},
    **{"l3": "l3", "l3cache": "l3", "l2": "l2", "l2cache": "l2", "core": "core", "pu": "pu"},
}
TOKEN = re.compile(r"([a-z0-9]+):(\d+)(?:\((indexes|memory)=([\w*:]+)\))?")
ATTACHED = re.compile(r"\[numa(?:node)?(?:\(memory=(\w+)\))?\]")
SIZE = re.compile(r"(\d+)([KMGT]?)I?B?")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    """(type, children per parent) from the outside in; the level that has the NUMA nodes; the PUs' numbering."""

    counts: tuple[tuple[str, int], ...]
    node_level: int | None
    memory_bytes: int | None
    indexes: str | None


def read_synthetic(text: str, *, name: str, model: str, isa: tuple[str, ...], memory_bytes: int) -> Machine:
    """Build the machine that `text` describes: levels type:count from the outside in, nested in any order.

    Types are pack, die, numa, l3, l2, core and pu, each at most once, core always, pu last; `[numa]` after a level
    gives each of its objects a NUMA node; without either each package is one. The PU level takes hwloc's interleaved
    numbering, `pu:2(indexes=2*48:48*1)`: loops count*step from the innermost out; numa takes `(memory=64GB)`, else a
    node has `memory_bytes`. Raises InputError on any other text.
    """
    levels = _levels(text)
    counts = [count for _, count in levels.counts]
    smt = counts[-1] if levels.counts[-1][0] == "pu" else 1
    core_levels = len(counts) - (levels.counts[-1][0] == "pu")
    total = prod(counts)
    number = _numbering(levels.indexes or f"{total}*1", total, text)
    shares: dict[tuple[str, int], list[int]] = {}
    places = []
    for core in range(total // smt):
        pus = tuple(sorted(number[core * smt : (core + 1) * smt]))
        place = {}
        for depth in range(core_levels):
            kind, ordinal = levels.counts[depth][0], core // prod(counts[depth + 1 : core_levels])
            place[kind] = ordinal
            if depth == levels.node_level:
                place["numa"] = ordinal
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
    node_ids = sorted({core.numa_node for core in cores if core.numa_node is not None})
    nodes = tuple(
        NumaNode(
            id=i,
            pus=tuple(sorted(pu for core in cores if core.numa_node == i for pu in core.pus)),
            memory_bytes=levels.memory_bytes or memory_bytes,
            near=(i,),
        )
        for i in node_ids
    )
    return Machine(
        name=name,
        model=model,
        isa=isa,
        cores=ordered(cores),
        numa_nodes=nodes,
        allowed_pus=tuple(sorted(number)),
        allowed_nodes=tuple(node_ids),
    )


def _levels(text: str) -> _Levels:
    counts: list[tuple[str, int]] = []
    indexes = node_level = memory = None
    for token in text.lower().split():
        attached, match = ATTACHED.fullmatch(token), TOKEN.fullmatch(token)
        if attached and node_level is None and counts:
            node_level, size = len(counts) - 1, attached.group(1)
        elif match and (kind := NAMES.get(match.group(1))) and int(match.group(2)):
            if kind in dict(counts) or "pu" in dict(counts) or (kind != "pu" and "core" in dict(counts)):
                raise InputError(f"machine {text!r}: {token!r} is out of order: each level once, core and pu last")
            what, value = match.group(3), match.group(4)
            if what and (what, kind) not in (("indexes", "pu"), ("memory", "numa")):
                raise InputError(f"machine {text!r}: {kind} takes no {what}: indexes belong to pu, memory to numa")
            counts.append((kind, int(match.group(2))))
            indexes = value if what == "indexes" else indexes
            size = value if what == "memory" else None
            node_level = len(counts) - 1 if kind == "numa" else node_level
        else:
            raise InputError(
                f"machine {text!r}: {token!r} is not {', '.join(dict.fromkeys(NAMES.values()))}:N or [numa]"
            )
        memory = _bytes(size, text) if size else memory
    if "core" not in dict(counts):
        raise InputError(f"machine {text!r} has no core:N level: add one, as in 'pack:2 core:24 pu:2'")
    if node_level is None:  # hwloc would give the whole host one NUMA node; no host of several packages is like that
        node_level = next((i for i, (kind, _) in enumerate(counts) if kind == "pack"), None)
    return _Levels(counts=tuple(counts), node_level=node_level, memory_bytes=memory, indexes=indexes)


def _bytes(size: str, text: str) -> int:
    match = SIZE.fullmatch(size.upper())
    if match is None:
        raise InputError(f"machine {text!r}: memory={size} is not a size: write 64GB")
    return int(match.group(1)) << " KMGT".index(match.group(2) or " ") * 10


def _numbering(indexes: str, pus: int, text: str) -> tuple[int, ...]:
    """OS number of each PU in logical order; a permutation of 0..pus-1."""
    loops = []
    for loop in indexes.split(":"):
        count, star, step = loop.partition("*")
        if not (star and count.isdigit() and step.isdigit()):
            raise InputError(f"machine {text!r}: indexes={indexes} is not count*step:count*step...")
        loops.append((int(count), int(step)))
    numbers = []
    for logical in range(pus):
        number, rest = 0, logical
        for turns, stride in loops:
            number += rest % turns * stride
            rest //= turns
        numbers.append(number)
    if sorted(numbers) != list(range(pus)):
        raise InputError(f"machine {text!r}: indexes={indexes} does not number its {pus} PUs from 0 to {pus - 1}")
    return tuple(numbers)
