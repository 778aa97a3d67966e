"""hwloc's synthetic description of a machine ("pack:2 numa:1 core:24 pu:2") -> Machine."""

import re
from itertools import product
from math import prod

from affinity.errors import InputError
from affinity.machine import Core, Machine, NumaNode, ordered

LEVELS = {"pack": "pack", "package": "pack", "numa": "numa", "numanode": "numa", "core": "core", "pu": "pu"}
ORDER = ("pack", "numa", "core", "pu")
TOKEN = re.compile(r"([a-z]+):(\d+)(?:\(indexes=([\d*:]+)\))?")


def read_synthetic(text: str, *, name: str, model: str, isa: tuple[str, ...], memory_bytes: int) -> Machine:
    """Build the machine that `text` describes: levels type:count from the outside in, each optional but core.

    The PU level takes hwloc's interleaved numbering, `pu:2(indexes=2*48:48*1)`: loops count*step from the innermost
    out. `memory_bytes` is that of one NUMA node. Raises InputError on anything outside this grammar.
    """
    counts, indexes = _levels(text)
    per_level = [counts.get(level, 1) for level in ORDER]
    numbering = indexes or f"{prod(per_level)}*1"
    number = _numbering(numbering, prod(per_level), text)
    cores = []
    pus_per_core = per_level[3]
    for logical, (package, node, _) in enumerate(product(*(range(n) for n in per_level[:3]))):
        pus = tuple(sorted(number[logical * pus_per_core : (logical + 1) * pus_per_core]))
        cores.append(Core(pus=pus, package=package, numa_node=package * per_level[1] + node))
    node_ids = range(per_level[0] * per_level[1])
    nodes = tuple(
        NumaNode(
            id=i,
            pus=tuple(sorted(p for c in cores if c.numa_node == i for p in c.pus)),
            memory_bytes=memory_bytes,
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


def _levels(text: str) -> tuple[dict[str, int], str | None]:
    counts: dict[str, int] = {}
    indexes = None
    for token in text.split():
        match = TOKEN.fullmatch(token.lower())
        level = LEVELS.get(match.group(1)) if match else None
        if match is None or level is None or int(match.group(2)) < 1 or (match.group(3) and level != "pu"):
            raise InputError(f"machine {text!r}: {token!r} is not pack:N, numa:N, core:N or pu:N")
        if any(ORDER.index(level) <= ORDER.index(seen) for seen in counts):
            raise InputError(f"machine {text!r}: {token!r} is out of order: write pack, numa, core, pu, each once")
        counts[level] = int(match.group(2))
        indexes = match.group(3) or indexes
    if "core" not in counts:
        raise InputError(f"machine {text!r} has no core:N level")
    return counts, indexes


def _numbering(indexes: str, pus: int, text: str) -> tuple[int, ...]:
    """OS number of each PU in logical order; a permutation of 0..pus-1."""
    loops = []
    for loop in indexes.split(":"):
        count, star, step = loop.partition("*")
        if not (star and count and step):
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
