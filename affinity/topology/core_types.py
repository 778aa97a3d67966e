"""Hybrid processors: the types of their cores, and how fast each type is."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from affinity.topology.kernel_files import ids, number_if_any

# hwloc's name of each of Intel's core types -> the kernel's performance counters of it.
INTEL_TYPES = {"IntelCore": "cpu_core", "IntelAtom": "cpu_atom", "IntelLowPower": "cpu_lowpower"}
# How fast a core is, best source first: the scheduler's own figure, the firmware's, the clock.
MEASURES = ("cpu_capacity", "acpi_cppc/highest_perf", "cpufreq/cpuinfo_max_freq")
# Speed relative to IntelCore where nothing gives it: firmware's figures of a Core i7-1370P (39 to 64) and, for the
# low-power cores, which have the same design at about two thirds of the clock.
ASSUMED = {"IntelCore": 1.0, "IntelAtom": 0.61, "IntelLowPower": 0.4}
# Work of a clock cycle of Intel's efficiency cores relative to its performance cores: HYBRID_SCALING_FACTOR_ADL of
# Linux's intel_pstate driver.
ATOM_PER_CLOCK = 0.787
# Cores whose figures differ by less are of one type: favored cores of one type have up to a tenth more.
NEARLY = 1.1

Types = list[tuple[int, ...]]


def core_speeds(devices: Path, pus: tuple[int, ...]) -> dict[int, float]:
    """PU -> speed of its core's type, 1.0 for the fastest; empty where all cores are of one type.

    `devices` is sys/devices, `pus` one PU of each core. Clocks alone do not tell types apart: the favored cores of one
    type have higher clocks, too. One name may stand for two types: Meteor Lake's low-power cores are cpu_atom, too.
    """
    named = _intel_types(devices, pus)
    types = list(named.values()) or _types(devices, pus)
    if len(types) < 2:
        return {}
    for measure in MEASURES:
        values = _values(devices, pus, measure)
        if values and measure.startswith("cpufreq"):
            values = {pu: clock * work_per_clock(named, pu) for pu, clock in values.items()}
        if values and (speeds := relative_speeds(split_by_speed(types, values), values)):
            return speeds
    return {pu: ASSUMED[name] for name, members in named.items() for pu in members}


def relative_speeds(types: Types, values: Mapping[int, float]) -> dict[int, float]:
    """PU -> the least value of its type, relative to the fastest type's; empty where all types have the same."""
    least = [min(values[pu] for pu in members) for members in types]
    if len(set(least)) < 2:
        return {}
    return {pu: value / max(least) for members, value in zip(types, least, strict=True) for pu in members}


def nearly_equal(values: Mapping[int, float]) -> Types:
    """The PUs in groups, slowest first: within a group the greatest value is less than NEARLY times the least."""
    groups: Types = []
    for pu in sorted(values, key=lambda pu: (values[pu], pu)):
        if groups and values[pu] < NEARLY * values[groups[-1][0]]:
            groups[-1] += (pu,)
        else:
            groups.append((pu,))
    return groups


def split_by_speed(types: Types, values: Mapping[int, float]) -> Types:
    """The types, each divided into those of nearly equal speed."""
    return [group for members in types for group in nearly_equal({pu: values[pu] for pu in members})]


def work_per_clock(named: Mapping[str, tuple[int, ...]], pu: int) -> float:
    """Relative to the performance cores of the same processor; 1 where the types have no names."""
    return 1.0 if all(pu not in members for name, members in named.items() if name != "IntelCore") else ATOM_PER_CLOCK


def _intel_types(devices: Path, pus: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Type -> its PUs by Intel's counters; empty where the host has not two such types that have all PUs."""
    listed = {name: devices / counters / "cpus" for name, counters in INTEL_TYPES.items()}
    named = {name: _members(pus, ids(path)) for name, path in listed.items() if path.is_file()}
    named = {name: members for name, members in named.items() if members}
    complete = sum(map(len, named.values())) == len(pus) == len({pu for members in named.values() for pu in members})
    return named if len(named) > 1 and complete else {}


def _types(devices: Path, pus: tuple[int, ...]) -> Types:
    """The PUs of each type by the scheduler's capacities, else by nominal performance."""
    for measure in ("cpu_capacity", "acpi_cppc/nominal_perf"):
        groups = nearly_equal(_values(devices, pus, measure))
        if len(groups) > 1:
            return groups
    return [pus]


def _members(pus: Iterable[int], listed: tuple[int, ...]) -> tuple[int, ...]:
    wanted = frozenset(listed)
    return tuple(pu for pu in pus if pu in wanted)


def _values(devices: Path, pus: tuple[int, ...], measure: str) -> dict[int, float]:
    """PU -> its figure; empty unless every PU has one."""
    found = {pu: number_if_any(devices / f"system/cpu/cpu{pu}" / measure) for pu in pus}
    values = {pu: float(value) for pu, value in found.items() if value is not None and value > 0}
    return values if len(values) == len(pus) else {}
