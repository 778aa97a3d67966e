"""Cores that belong together: by NUMA node and core type, by die, by level-3 cache."""

from affinity.topology.machine import Core

Cores = tuple[Core, ...]


def uniform_groups(cores: Cores) -> list[Cores]:
    """The cores of each NUMA node and core type, in the machine's order; those without a node are one
    group per package and type."""
    groups: dict[tuple[int | None, int | None, float], list[Core]] = {}
    for core in cores:
        homeless = core.package if core.numa_node is None else None
        groups.setdefault((core.numa_node, homeless, core.speed), []).append(core)
    return [tuple(group) for group in groups.values()]


def cores_by(level: str, cores: Cores) -> list[Cores]:
    """The cores of each die or level-3 cache (`level` "die" or "l3"); one group where the level is not known."""
    units: dict[tuple[int, int | None], list[Core]] = {}
    for core in cores:
        units.setdefault((core.package, core.die if level == "die" else core.l3), []).append(core)
    return [tuple(unit) for unit in units.values()]
