"""NUMA nodes of a /sys tree: PUs, memory, kind of memory, nearest PUs."""

import re
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import InputError
from affinity.topology.kernel_files import first_file, ids, number, numbers, text
from affinity.topology.machine import NumaNode

# CPU family and model of Knights Landing and Knights Mill, which have MCDRAM in their package.
XEON_PHI = (("6", "87"), ("6", "133"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """By node: memory, and its speed by tier and by bandwidth where the kernel has them."""

    memory_bytes: dict[int, int]
    tier_speed: dict[int, int]
    bandwidth: dict[int, int]


def read_nodes(devices: Path, online: tuple[int, ...], *, on_package_memory: bool) -> tuple[NumaNode, ...]:
    """The nodes under sys/devices, by id; only online PUs count. Ids may have gaps, and exceed nine.

    `on_package_memory`: this processor's memory without PUs is HBM or MCDRAM, where the kernel has no speed of it.
    """
    folders = {int(f.name[4:]): f for f in (devices / "system/node").glob("node[0-9]*")}
    folders = dict(sorted(folders.items()))
    pus = {i: _pus(folder, online) for i, folder in folders.items()}
    near = {i: (i,) if pus[i] else _near(i, folders, pus) for i in folders}
    facts = _Facts(
        memory_bytes={i: _memory_bytes(folder / "meminfo") for i, folder in folders.items()},
        tier_speed=_tier_speeds(devices / "virtual/memory_tiering"),
        bandwidth={i: value for i, folder in folders.items() if (value := _bandwidth(folder)) is not None},
    )
    return tuple(
        NumaNode(
            id=i,
            pus=pus[i],
            memory_bytes=facts.memory_bytes[i],
            kind="dram" if pus[i] else _kind(i, near, facts, on_package=on_package_memory),
            near=near[i],
        )
        for i in folders
    )


def _pus(folder: Path, online: tuple[int, ...]) -> tuple[int, ...]:
    path = first_file(folder, ("cpulist", "cpumap"))
    return () if path is None else tuple(pu for pu in ids(path) if pu in online)


def _memory_bytes(meminfo: Path) -> int:
    if not meminfo.is_file():
        return 0
    found = re.search(r"MemTotal:\s*(\d+) kB", text(meminfo))
    if found is None:
        raise InputError(f"{meminfo} has no line MemTotal: copy the tree again")
    return int(found.group(1)) * 1024


def _near(node: int, folders: dict[int, Path], pus: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    """The nodes with PUs nearest to a memory-only node: by the firmware's HMAT, else those at the least distance.

    access1 names initiators that are CPUs; access0 may name accelerators, and older kernels have it alone.
    """
    for access in ("access1", "access0"):
        folder = folders[node] / access / "initiators"
        named = sorted(int(f.name[4:]) for f in folder.glob("node[0-9]*"))
        if found := tuple(i for i in named if pus.get(i)):
            return found
    distance = folders[node] / "distance"
    values = numbers(distance) if distance.is_file() else ()
    to = {other: value for other, value in zip(folders, values, strict=False) if pus[other]}
    return tuple(other for other, value in to.items() if value == min(to.values()))


def _tier_speeds(folder: Path) -> dict[int, int]:
    """Node -> minus the number of its memory tier (low tiers are fast); empty on kernels without tiers."""
    return {
        node: -int(tier.name.removeprefix("memory_tier"))
        for tier in folder.glob("memory_tier[0-9]*")
        if (tier / "nodelist").is_file()
        for node in ids(tier / "nodelist")
    }


def _kind(node: int, near: dict[int, tuple[int, ...]], facts: _Facts, *, on_package: bool) -> str:
    """A memory-only node compared with the memory of the PUs next to it: by tier, else bandwidth, else processor."""
    own = [i for i in near[node] if facts.memory_bytes[i]]
    if near[node] and not own:  # the PUs' own nodes have no memory: the fastest next to them is their DRAM
        rivals = [i for i, others in near.items() if set(others) & set(near[node])]
        fastest = max((facts.bandwidth[i] for i in rivals if i in facts.bandwidth), default=0)
        return "dram" if facts.bandwidth.get(node, 0) == fastest else "slow"
    for speed in (facts.tier_speed, facts.bandwidth):
        beside = [speed[i] for i in own if i in speed]
        if node in speed and beside:
            return _compared(speed[node], max(beside))
    return "hbm" if on_package else "slow"


def _compared(speed: int, own: int) -> str:
    if speed == own:
        return "dram"
    return "hbm" if speed > own else "slow"


def _bandwidth(folder: Path) -> int | None:
    """MB/s from the nearest PUs by the firmware's HMAT; None where it has no entry."""
    path = first_file(folder, ("access1/initiators/read_bandwidth", "access0/initiators/read_bandwidth"))
    return None if path is None else number(path)
