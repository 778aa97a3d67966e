"""Hybrid processors: the types of their cores, and how fast each type is."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median

from affinity.topology.kernel_files import ids, number

# The kernel's performance counters for Intel's core types.
INTEL_TYPES = ("cpu_core", "cpu_atom", "cpu_lowpower")
# How fast a core is, best source first: the scheduler's own figure, the firmware's, the clock.
MEASURES = ("cpu_capacity", "acpi_cppc/highest_perf", "cpufreq/cpuinfo_max_freq")


def core_speeds(devices: Path, pus: tuple[int, ...]) -> dict[int, float]:
    """PU -> speed of its core's type, 1.0 for the fastest; empty where all cores are of one type.

    `devices` is sys/devices, `pus` one PU of each core. Clocks alone do not tell types apart: the favored cores of one
    type have higher clocks, too.
    """
    types = _types(devices, pus)
    if len(types) < 2:
        return {}
    for measure in MEASURES:
        values = _values(devices, pus, measure)
        if len(values) == len(pus):
            typical = [median(values[pu] for pu in members) for members in types]
            if len(set(typical)) > 1:
                return {pu: v / max(typical) for members, v in zip(types, typical, strict=True) for pu in members}
    return {}


def _types(devices: Path, pus: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The PUs of each type, by Intel's counters, else by the scheduler's capacities, else by nominal performance."""
    listed = [devices / name / "cpus" for name in INTEL_TYPES]
    named = [set(ids(path)) for path in listed if path.is_file()]
    if len(named) > 1 and set().union(*named).issuperset(pus):
        return [members for cpus in named if (members := tuple(pu for pu in pus if pu in cpus))]
    for measure in ("cpu_capacity", "acpi_cppc/nominal_perf"):
        values = _values(devices, pus, measure)
        if len(set(values.values())) > 1 and len(values) == len(pus):
            return [tuple(pu for pu in pus if values[pu] == value) for value in sorted(set(values.values()))]
    return [pus]


def _values(devices: Path, pus: tuple[int, ...], measure: str) -> Mapping[int, int]:
    paths = {pu: devices / f"system/cpu/cpu{pu}" / measure for pu in pus}
    if not paths[pus[0]].is_file():
        return {}
    return {pu: number(path) for pu, path in paths.items() if path.is_file()}
