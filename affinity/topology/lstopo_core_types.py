"""The kinds of cores of a hybrid processor in lstopo's XML, and how fast each is."""

from collections.abc import Callable
from xml.etree import ElementTree

from affinity.topology.core_types import ASSUMED, nearly_equal, relative_speeds, split_by_speed, work_per_clock
from affinity.topology.cpuset import parse_mask
from affinity.topology.lstopo_numbers import plain_number

Speeds = dict[int, float]
Figures = list[tuple[tuple[int, ...], dict[str, str]]]  # PUs of a kind, one of each core; what is known of it


def core_types(root: ElementTree.Element, pus: tuple[int, ...], vendor: str | None) -> tuple[Speeds, tuple[str, ...]]:
    """PU -> speed of its core's type, 1.0 for the fastest, and warnings; empty where all cores are of one type.

    `pus` is one PU of each core. Best source first: Linux's capacities, clocks, the types' names, hwloc's ranks.
    """
    kinds = [(tuple(pu for pu in pus if pu in mask), known) for mask, known in map(_kind, root.findall("cpukind"))]
    kinds = [(members, known) for members, known in kinds if members]
    if len(kinds) < 2 or sorted(pu for members, _ in kinds for pu in members) != sorted(pus):
        return {}, ()
    for source in (_by_capacity, _by_clock(vendor), _by_name):
        speeds = source(kinds)
        if speeds is not None:
            return speeds, ()
    return _by_rank(kinds)


def _kind(element: ElementTree.Element) -> tuple[frozenset[int], dict[str, str]]:
    known = {info.get("name", ""): info.get("value", "") for info in element.findall("info")}
    rank = element.get("forced_efficiency", element.get("efficiency"))
    return frozenset(parse_mask(element.get("cpuset", "0"))), known if rank is None else {**known, "rank": rank}


def _numbers(kinds: Figures, name: str) -> Speeds:
    """PU -> the figure of that name; empty unless every kind has one."""
    values = {pu: float(plain_number(known.get(name, "0"))) for members, known in kinds for pu in members}
    return values if all(value > 0 for value in values.values()) else {}


def _by_capacity(kinds: Figures) -> Speeds | None:
    values = _numbers(kinds, "LinuxCapacity")
    return relative_speeds(nearly_equal(values), values) if values else None


def _by_clock(vendor: str | None) -> Callable[[Figures], Speeds | None]:
    def speeds(kinds: Figures) -> Speeds | None:
        """By the highest clocks. Types are told apart by names, else by the base clocks, which all cores of a
        type share: the highest are higher on favored cores. Intel's slow types do less in a clock cycle."""
        clocks = _numbers(kinds, "FrequencyMaxMHz")
        if not clocks:
            return None
        named: dict[str, tuple[int, ...]] = {}
        for members, known in kinds:
            name = known.get("CoreType", "")
            named[name] = named.get(name, ()) + members
        if "" in named:
            groups = nearly_equal(_numbers(kinds, "FrequencyBaseMHz") or clocks)
            slow = tuple(pu for group in groups[:-1] for pu in group)
            named = {"IntelAtom": slow} if vendor == "GenuineIntel" else {}
        else:
            groups = split_by_speed(list(named.values()), clocks)
        return relative_speeds(groups, {pu: clock * work_per_clock(named, pu) for pu, clock in clocks.items()})

    return speeds


def _by_name(kinds: Figures) -> Speeds | None:
    """Intel's types at their assumed speeds."""
    if not all(known.get("CoreType") in ASSUMED for _, known in kinds):
        return None
    speeds = {pu: ASSUMED[known["CoreType"]] for members, known in kinds for pu in members}
    return {pu: speed / max(speeds.values()) for pu, speed in speeds.items()}


def _by_rank(kinds: Figures) -> tuple[Speeds, tuple[str, ...]]:
    """Ranks tell which type is faster, not by how much: the speeds are those assumed of Intel's types."""
    ranks = sorted({plain_number(known.get("rank", "0")) for _, known in kinds}, reverse=True)
    if len(ranks) < 2:
        return {}, ()
    steps = tuple(ASSUMED.values())
    speeds = {
        pu: steps[min(ranks.index(plain_number(known.get("rank", "0"))), len(steps) - 1)]
        for members, known in kinds
        for pu in members
    }
    shown = ", ".join(f"{speed:g}" for speed in sorted(set(speeds.values()), reverse=True))
    return speeds, (f"the XML ranks {len(ranks)} types of cores without their speeds: assumed {shown}",)
