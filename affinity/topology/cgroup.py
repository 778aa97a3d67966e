"""The limits of control groups and cpusets under a root: PUs, memory nodes, CPU time, memory.

Reads cgroup v2, cgroup v1 and legacy cpusets, at the mount points that /proc/mounts names.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import OCTAL
from cputrain.affinity.topology.kernel_files import NUMBER, first_file, number, rows, text
from cputrain.affinity.topology.machine import parse_list

# The usual mount points; tried first, as /proc/mounts of an unpacked tree may be missing.
USUAL_MOUNTS = (
    ("v2", "/sys/fs/cgroup"),
    ("v2", "/sys/fs/cgroup/unified"),
    ("v1", "/sys/fs/cgroup/cpuset"),
    ("legacy", "/dev/cpuset"),
)
CPUS = {"v2": "cpuset.cpus.effective", "v1": "cpuset.cpus", "legacy": "cpus"}
MEMS = {"v2": "cpuset.mems.effective", "v1": "cpuset.mems", "legacy": "mems"}
PARTITION, ISOLATED = "cpuset.cpus.partition", "isolated"  # "isolated invalid (...)" is no partition
LIMIT_FILES = (
    *CPUS.values(),
    *MEMS.values(),
    PARTITION,
    *("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us", "memory.max", "memory.limit_in_bytes"),
)
NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """PUs, NUMA nodes, CPU time in PUs' worth, bytes of memory; None where there is no limit. `isolated`: the PUs are a
    partition in which the scheduler moves no threads."""

    pus: tuple[int, ...] | None
    nodes: tuple[int, ...] | None
    cpu_quota: float | None
    memory_bytes: int | None
    isolated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A hierarchy of control groups: its version (v2, v1 or legacy), mount point and controllers."""

    version: str
    path: Path
    controllers: tuple[str, ...]


def read_limits(root: Path) -> Limits:
    """The limits of the process whose /proc/self is under root. Raises InputError naming a wrong file."""
    groups = _own_groups(root)
    cpusets: list[tuple[Path, str]] = []
    quotas: list[float] = []
    memory: list[int] = []
    for mount in _mounts(root):
        folders = _upwards(mount.path, groups.get(mount.version, groups.get("cpuset", "/")))
        if mount.version != "v1" or "cpuset" in mount.controllers:
            cpusets += [(folder, mount.version) for folder in folders]
        for controller in mount.controllers or (("cpu", "memory") if mount.version == "v2" else ()):
            own = folders if mount.version == "v2" else _upwards(mount.path, groups.get(controller, "/"))
            if controller == "cpu":
                quotas += [quota for folder in own if (quota := _quota(folder)) is not None]
            if controller == "memory":
                memory += [limit for folder in own if (limit := _memory_limit(folder)) is not None]
    return Limits(
        pus=_innermost(cpusets, CPUS),
        nodes=_innermost(cpusets, MEMS),
        cpu_quota=min(quotas, default=None),
        memory_bytes=min(memory, default=None),
        isolated=any((folder / PARTITION).is_file() and text(folder / PARTITION) == ISOLATED for folder, _ in cpusets),
    )


def limit_files(root: Path) -> tuple[Path, ...]:
    """The files of control groups that `read_limits` may read."""
    return tuple(folder / name for folder in own_folders(root) for name in LIMIT_FILES if (folder / name).is_file())


def own_folders(root: Path) -> tuple[Path, ...]:
    """The folders of the process's own control groups and of those above, sorted."""
    groups = _own_groups(root)
    folders = {
        folder
        for mount in _mounts(root)
        for name in (mount.version, "cpuset", *mount.controllers)
        if name in groups
        for folder in _upwards(mount.path, groups[name])
    }
    return tuple(sorted(folders))


def _mounts(root: Path) -> list[Mount]:
    found = {
        mount: Mount(version=version, path=root / mount.lstrip("/"), controllers=()) for version, mount in USUAL_MOUNTS
    }
    for _, where, file_system, options, *_ in rows(root / "proc/mounts", 6, " "):  # a source may be empty
        names = tuple(options.split(","))
        path = root / OCTAL.sub(lambda code: chr(int(code[1], 8)), where).lstrip("/")  # proc(5): a blank is \\040
        if file_system == "cgroup2":
            found[where] = Mount(version="v2", path=path, controllers=())
        elif file_system == "cpuset" or (file_system == "cgroup" and {"cpuset", "noprefix"} <= set(names)):
            found[where] = Mount(version="legacy", path=path, controllers=("cpuset",))
        elif file_system == "cgroup":
            found[where] = Mount(version="v1", path=path, controllers=names)
    # A usual mount point that proc/mounts does not name is assumed to be of its usual version.
    return [
        replace(mount, controllers=("cpuset",)) if mount.version == "v1" and not mount.controllers else mount
        for mount in found.values()
        if os.path.isdir(mount.path)  # noqa: PTH112  Path.is_dir raises where a folder above may not be searched
    ]


def _own_groups(root: Path) -> dict[str, str]:
    """Controller (or "v2", "legacy") -> this process's group in its hierarchy."""
    groups: dict[str, str] = {}
    cpuset = root / "proc/self/cpuset"
    for hierarchy, controllers, group in rows(root / "proc/self/cgroup", 3, ":"):
        if hierarchy == "0" and not controllers:
            groups["v2"] = group
        groups |= dict.fromkeys(filter(None, controllers.split(",")), group)
    if cpuset.is_file():
        groups["legacy"] = text(cpuset)
        groups.setdefault("cpuset", groups["legacy"])
    return groups


def _upwards(mount: Path, group: str) -> list[Path]:
    """The group's folder and those above it, innermost first; a group outside the mount (".." in a container) is the
    mount itself."""
    parts = [part for part in PurePosixPath(group).parts if part not in ("/", "..")]
    return [mount.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _innermost(cpusets: list[tuple[Path, str]], names: dict[str, str]) -> tuple[int, ...] | None:
    """The ids in the first file that exists and is not empty: v1 and legacy groups start with empty ones."""
    for folder, version in cpusets:
        file = folder / names[version]
        if file.is_file() and text(file):
            try:
                return parse_list(text(file))
            except ValueError:
                raise InputError(f"{file} contains {text(file)[:40]!r}, which is not a list of ids") from None
    return None


def _quota(folder: Path) -> float | None:
    """This group's CPU time in PUs' worth: quota / period."""
    v2, v1 = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if v2.is_file():
        quota, period = (*text(v2).split(), "100000", "")[:2]
        if quota == "max":
            return None
        if not (NUMBER.fullmatch(quota) and NUMBER.fullmatch(period) and int(quota) > 0 and int(period) > 0):
            raise InputError(f"{v2} contains {text(v2)[:40]!r}, which is not a quota and a period")
        return int(quota) / int(period)
    if v1.is_file() and number(v1) > 0:
        return number(v1) / max(number(folder / "cpu.cfs_period_us"), 1)
    return None


def _memory_limit(folder: Path) -> int | None:
    file = first_file(folder, ("memory.max", "memory.limit_in_bytes"))
    if file is None or text(file) == "max":
        return None
    return None if number(file) >= NO_LIMIT_BYTES else number(file)
