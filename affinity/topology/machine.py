"""Machine topology as frozen values (packages, NUMA nodes, cores, PUs, caches), and the text formats of CPU sets."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from cputrain.affinity.wording import plural

MAX_IDS = 1 << 16  # far beyond any kernel's NR_CPUS; a larger id means damaged input
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
WORD = re.compile(r"(?:0x)?[0-9a-fA-F]*")

# Types with constraints, which are checked when plan.json is read.
Count = Annotated[int, Meta(ge=0)]
OneOrMore = Annotated[int, Meta(ge=1)]
Ids = Annotated[tuple[Count, ...], Meta(extra_json_schema={"uniqueItems": True})]


def one_of(*words: str) -> Meta:
    """Restrict a text to one of these words."""
    # Python's $ also matches before a final line break, and JSON Schema has no \Z.
    return Meta(pattern=f"^({'|'.join(words)})(?!\\n)$", extra_json_schema={"enum": [*words]})


def parse_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's list format ("0-3,8", "" for an empty list) into ascending ids.

    Raises ValueError on anything else.
    """
    ids: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = RANGE.fullmatch(part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if high < low or high >= MAX_IDS:
            raise ValueError(f"bad range {part!r} in CPU list {text.strip()!r}")
        ids.update(range(low, high + 1))
    return tuple(sorted(ids))


def format_list(ids: Iterable[int]) -> str:
    """Write ids in the kernel's list format; the inverse of `parse_list`."""
    ranges: list[list[int]] = []
    for i in sorted(set(ids)):
        if ranges and i == ranges[-1][1] + 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def name_cpus(ids: Iterable[int]) -> str:
    """Name CPUs: "CPU 0", "CPUs 0-3,8"."""
    listed = format_list(ids)
    return f"CPU {listed}" if listed.isdecimal() else f"CPUs {listed}"


def parse_mask(text: str) -> tuple[int, ...]:
    """Parse a mask of 32-bit hexadecimal words, most significant first, into ascending ids.

    The kernel writes "1,00000003", hwloc "0x1,,0x3" with empty words for zero. Raises ValueError on anything else.
    """
    words = [word.strip() for word in text.strip().split(",")]
    if len(words) * 32 > MAX_IDS or not all(WORD.fullmatch(word) and len(word) <= MAX_IDS // 4 for word in words):
        raise ValueError(f"bad CPU mask {text.strip()[:40]!r}")
    mask = 0
    for word in words:
        mask = mask << 32 | int(word.removeprefix("0x") or "0", 16)
    return tuple(i for i, bit in enumerate(reversed(f"{mask:b}")) if bit == "1")


def format_mask(ids: Iterable[int]) -> str:
    """Write ids as one hexadecimal number, bit i for id i: (0, 1) -> "0x3"."""
    return hex(sum(1 << i for i in set(ids)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """A physical core.

    pus: its hardware threads, ascending.
    package: the CPU socket.
    numa_node: the NUMA node; None if the kernel lists none.
    die: the die within the package; None if the package is a single die.
    l3: the level-3 cache, identified by its lowest PU; None if unknown.
    l2: the level-2 cache, identified by its lowest PU; None if unknown.
    speed: speed relative to the host's fastest type of core; below 1 only for the slow cores of a hybrid processor.
    """

    pus: Ids
    package: int
    numa_node: int | None
    die: int | None = None
    l3: int | None = None
    l2: int | None = None
    speed: Annotated[float, Meta(gt=0, le=1)] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """A NUMA node.

    id: the kernel's id of the node.
    pus: its hardware threads; empty for a memory-only node.
    memory_bytes: size of its memory; 0 for a node without memory.
    kind: type of memory; hbm: faster (MCDRAM, HBM); slow: CXL, NVM or memory of a GPU; unknown: memory without PUs and
        of unknown speed.
    near: the NUMA nodes whose PUs are next to this memory; for a node with PUs the node itself.
    bandwidth_mb_s: read bandwidth from the nearest PUs, from the firmware's HMAT; None if unknown.
    latency_ns: read latency from the nearest PUs, from the firmware's HMAT; None if unknown.
    tier: the kernel's memory tier; low tiers are fast; None if unknown.
    memory_assumed: whether memory_bytes is a typical size, because the description of the host has none.
    """

    id: Count
    pus: Ids
    memory_bytes: Count
    kind: Annotated[str, one_of("dram", "hbm", "slow", "unknown")] = "dram"
    near: Ids
    bandwidth_mb_s: int | None = None
    latency_ns: int | None = None
    tier: int | None = None
    memory_assumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A host, and the parts of it that this process may use.

    name: its host name, or its name in the catalog.
    model: the processor's name.
    isa: vector extensions, by the kernel's names.
    cores: all cores, ordered by package, NUMA node, die, caches and first PU.
    numa_nodes: all NUMA nodes.
    allowed_pus: hardware threads that this process may use. Like allowed_nodes, read from the kernel (affinity mask,
        cpuset), never derived from the topology.
    allowed_nodes: NUMA nodes whose memory this process may use.
    cpu_quota: the control groups' limit of CPU time, in CPUs; None: no limit.
    memory_limit_bytes: the control groups' memory limit, in bytes; None: no limit.
    isolated_pus: CPUs between which the scheduler moves no thread (isolcpus).
    warnings: errors and gaps in the description of the host.
    """

    name: str
    model: str
    isa: tuple[str, ...]
    cores: tuple[Core, ...]
    numa_nodes: tuple[NumaNode, ...]
    allowed_pus: tuple[int, ...]
    allowed_nodes: tuple[int, ...]
    cpu_quota: float | None = None
    memory_limit_bytes: int | None = None
    isolated_pus: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def packages(self) -> tuple[int, ...]:
        """Ids of the packages, ascending."""
        return tuple(sorted({core.package for core in self.cores}))

    @property
    def pus(self) -> tuple[int, ...]:
        """All online PUs, ascending."""
        return tuple(sorted(pu for core in self.cores for pu in core.pus))

    @property
    def counts(self) -> tuple[str, str, str, str]:
        """Its packages, NUMA nodes, cores and CPUs: ("2 packages", "2 NUMA nodes", "48 cores", "96 CPUs")."""
        return (
            plural(len(self.packages), "package"),
            plural(len(self.numa_nodes), "NUMA node"),
            plural(len(self.cores), "core"),
            plural(len(self.pus), "CPU"),
        )

    @property
    def core_of(self) -> dict[int, Core]:
        """The core of each online PU."""
        return {pu: core for core in self.cores for pu in core.pus}

    @property
    def allowed_cores(self) -> tuple[Core, ...]:
        """The cores with at least one allowed PU, with their allowed PUs only."""
        allowed = frozenset(self.allowed_pus)
        narrow = (
            core if allowed.issuperset(core.pus) else replace(core, pus=tuple(pu for pu in core.pus if pu in allowed))
            for core in self.cores
        )
        return tuple(core for core in narrow if core.pus)


def ordered_cores(cores: list[Core]) -> tuple[Core, ...]:
    """Sort cores for `Machine.cores`, so that consecutive cores share as many levels as possible.

    Cores without a NUMA node come last in their package.
    """

    def place(core: Core) -> tuple[int, ...]:
        node = core.numa_node
        return (core.package, node is None, node or 0, core.die or 0, core.l3 or 0, core.l2 or 0, *core.pus)

    return tuple(sorted(cores, key=place))


def narrow_machine(machine: Machine, pus: frozenset[int] | None, nodes: frozenset[int] | None = None) -> Machine:
    """Restrict a machine's allowed PUs and memory nodes to these; None keeps all of them."""
    return replace(
        machine,
        allowed_pus=tuple(pu for pu in machine.allowed_pus if pus is None or pu in pus),
        allowed_nodes=tuple(node for node in machine.allowed_nodes if nodes is None or node in nodes),
    )


def without_limits(machine: Machine) -> Machine:
    """Return the machine without any limits of this process."""
    return replace(
        machine,
        allowed_pus=machine.pus,
        allowed_nodes=tuple(node.id for node in machine.numa_nodes),
        cpu_quota=None,
        memory_limit_bytes=None,
    )


def missing_node_warnings(cores: tuple[Core, ...]) -> tuple[str, ...]:
    """Warn if cores have no NUMA node, because its memory is offline, or it is missing in the description."""
    pus = [pu for core in cores if core.numa_node is None for pu in core.pus]
    if not pus:
        return ()
    return (f"CPUs {format_list(pus)} belong to no NUMA node: the kernel chooses the memory of workers there",)


def memory_warnings(machine: Machine) -> tuple[str, ...]:
    """Warn if all memory sizes are unknown, or if allowed cores have no usable memory next to them."""
    sized = [node for node in machine.numa_nodes if node.memory_bytes]
    if not sized:
        return ("the memory size of this host is unknown: no check whether a training fits in it",)
    near = {
        i
        for node in sized
        if node.id in machine.allowed_nodes and (node.pus or node.kind in ("dram", "hbm"))
        for i in node.near
    }
    far = [pu for core in machine.allowed_cores if core.numa_node not in {None, *near} for pu in core.pus]
    if not far:
        return ()
    return (
        f"CPUs {format_list(far)} have no memory next to them that this process may use: all memory of their workers "
        "is remote",
    )
