"""Hybrid processors: which cores are of a slower kind, and how much slower."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median

from affinity.topology.kernel_files import ids, number

# What the kernel calls Intel's kinds of cores, as its performance counters list them.
INTEL_KINDS = ("cpu_core", "cpu_atom", "cpu_lowpower")
# How fast a core is, best source first: the scheduler's own figure, the firmware's, the clock.
MEASURES = ("cpu_capacity", "acpi_cppc/highest_perf", "cpufreq/cpuinfo_max_freq")


def core_speeds(devices: Path, pus: tuple[int, ...]) -> dict[int, float]:
    """PU -> speed of its kind of core, 1.0 for the fastest; empty where all are of one kind.

    `devices` is sys/devices, `pus` one PU of each core. Clocks alone tell no kinds apart: favoured cores of one kind
    differ in them too.
    """
    kinds = _kinds(devices, pus)
    if len(kinds) < 2:
        return {}
    for measure in MEASURES:
        values = _values(devices, pus, measure)
        if len(values) == len(pus):
            typical = [median(values[pu] for pu in kind) for kind in kinds]
            if len(set(typical)) > 1:
                return {pu: v / max(typical) for kind, v in zip(kinds, typical, strict=True) for pu in kind}
    return {}


def _kinds(devices: Path, pus: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The PUs of each kind: as Intel's counters, else the scheduler's capacities, else nominal performance tell."""
    listed = [devices / name / "cpus" for name in INTEL_KINDS]
    named = [set(ids(path)) for path in listed if path.is_file()]
    if len(named) > 1 and set().union(*named).issuperset(pus):
        return [kind for cpus in named if (kind := tuple(pu for pu in pus if pu in cpus))]
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
