"""Cores that belong together: by NUMA node and core type, by die, by level-3 cache."""

from dataclasses import dataclass

from affinity.topology.machine import Core
from affinity.wording import counted

Cores = tuple[Core, ...]


def uniform_groups(cores: Cores) -> list[Cores]:
    """The cores of each NUMA node and core type, in the machine's order; those without a node are one
    group per package and type."""
    groups: dict[tuple[int | None, int | None, float], list[Core]] = {}
    for core in cores:
        homeless = core.package if core.numa_node is None else None
        groups.setdefault((core.numa_node, homeless, core.speed), []).append(core)
    return [tuple(group) for group in groups.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlaces:
    """Where cores have their memory: their NUMA nodes, and the packages of those that belong to no node."""

    nodes: frozenset[int]
    packages: frozenset[int]

    @property
    def count(self) -> int:
        """Nodes and packages."""
        return len(self.nodes) + len(self.packages)

    def __str__(self) -> str:
        """ "2 NUMA nodes", "1 NUMA node and 1 package without one"."""
        nodes = counted(len(self.nodes), "NUMA node")
        if not self.packages:
            return nodes
        packages = counted(len(self.packages), "package")
        return f"{nodes} and {packages} without one" if self.nodes else f"{packages} without NUMA node"


def memory_places(cores: Cores) -> MemoryPlaces:
    """The places of these cores' memory."""
    return MemoryPlaces(
        nodes=frozenset(core.numa_node for core in cores if core.numa_node is not None),
        packages=frozenset(core.package for core in cores if core.numa_node is None),
    )


def cores_by(level: str, cores: Cores) -> list[Cores]:
    """The cores of each die or level-3 cache (`level` "die" or "l3"); one group where the level is not known."""
    units: dict[tuple[int, int | None], list[Core]] = {}
    for core in cores:
        units.setdefault((core.package, core.die if level == "die" else core.l3), []).append(core)
    return [tuple(unit) for unit in units.values()]
