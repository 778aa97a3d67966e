"""What control groups and cpusets under a root leave to a process: PUs, memory nodes, CPU time, memory.

Reads cgroup v2, cgroup v1 and legacy cpusets, at whatever mount points /proc/mounts names.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from affinity.errors import InputError
from affinity.topology.cpuset import parse_list
from affinity.topology.kernel_files import first_file, number, rows, text

# Where they are mounted almost everywhere; looked at first, as /proc/mounts of an unpacked tree may be absent.
USUAL_MOUNTS = (
    ("v2", "/sys/fs/cgroup"),
    ("v2", "/sys/fs/cgroup/unified"),
    ("v1", "/sys/fs/cgroup/cpuset"),
    ("legacy", "/dev/cpuset"),
)
CPUS = {"v2": "cpuset.cpus.effective", "v1": "cpuset.cpus", "legacy": "cpus"}
MEMS = {"v2": "cpuset.mems.effective", "v1": "cpuset.mems", "legacy": "mems"}
NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None where nothing limits: PUs, NUMA nodes, cores' worth of CPU time, bytes of memory."""

    pus: tuple[int, ...] | None
    nodes: tuple[int, ...] | None
    cpu_quota: float | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A hierarchy of control groups: v2, v1 or legacy, where it is, which controllers it has."""

    kind: str
    path: Path
    controllers: tuple[str, ...]


def read_limits(root: Path) -> Limits:
    """The limits of the process whose /proc/self lies under root. Raises InputError naming a file without sense."""
    groups = _own_groups(root)
    cpusets: list[tuple[Path, str]] = []
    quotas: list[float] = []
    memory: list[int] = []
    for mount in _mounts(root):
        folders = _upwards(mount.path, groups.get(mount.kind, groups.get("cpuset", "/")))
        if mount.kind != "v1" or "cpuset" in mount.controllers:
            cpusets += [(folder, mount.kind) for folder in folders]
        for controller in mount.controllers or (("cpu", "memory") if mount.kind == "v2" else ()):
            own = folders if mount.kind == "v2" else _upwards(mount.path, groups.get(controller, "/"))
            if controller == "cpu":
                quotas += [quota for folder in own if (quota := _quota(folder)) is not None]
            if controller == "memory":
                memory += [limit for folder in own if (limit := _memory_limit(folder)) is not None]
    return Limits(
        pus=_innermost(cpusets, CPUS),
        nodes=_innermost(cpusets, MEMS),
        cpu_quota=min(quotas, default=None),
        memory_bytes=min(memory, default=None),
    )


def _mounts(root: Path) -> list[Mount]:
    found = {mount: Mount(kind=kind, path=root / mount.lstrip("/"), controllers=()) for kind, mount in USUAL_MOUNTS}
    for _, where, kind, options, *_ in rows(root / "proc/mounts", 6):
        names = tuple(options.split(","))
        path = root / where.lstrip("/")
        if kind == "cgroup2":
            found[where] = Mount(kind="v2", path=path, controllers=())
        elif kind == "cpuset" or (kind == "cgroup" and {"cpuset", "noprefix"} <= set(names)):
            found[where] = Mount(kind="legacy", path=path, controllers=("cpuset",))
        elif kind == "cgroup":
            found[where] = Mount(kind="v1", path=path, controllers=names)
    # A usual place that proc/mounts does not name is taken for what it usually is.
    return [
        mount if mount.kind != "v1" or mount.controllers else Mount(kind="v1", path=mount.path, controllers=("cpuset",))
        for mount in found.values()
        if mount.path.is_dir()
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
    """The group's folder and those above it, innermost first; a group outside the mount (".." in a container) is it."""
    parts = [part for part in PurePosixPath(group).parts if part not in ("/", "..")]
    return [mount.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _innermost(cpusets: list[tuple[Path, str]], names: dict[str, str]) -> tuple[int, ...] | None:
    """The first file that is there and not empty; v1 and legacy children may be empty until someone fills them."""
    for folder, kind in cpusets:
        file = folder / names[kind]
        if file.is_file() and text(file):
            try:
                return parse_list(text(file))
            except ValueError:
                raise InputError(f"{file} holds {text(file)[:40]!r}, which is no list") from None
    return None


def _quota(folder: Path) -> float | None:
    """CPU time in cores' worth that this group gives: quota / period."""
    v2, v1 = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if v2.is_file():
        quota, period = (*text(v2).split(), "100000", "")[:2]
        if quota == "max":
            return None
        if not (quota.isdigit() and period.isdigit() and int(period)):
            raise InputError(f"{v2} holds {text(v2)[:40]!r}, which is no quota and period")
        return int(quota) / int(period)
    if v1.is_file() and number(v1) > 0:
        return number(v1) / max(number(folder / "cpu.cfs_period_us"), 1)
    return None


def _memory_limit(folder: Path) -> int | None:
    file = first_file(folder, ("memory.max", "memory.limit_in_bytes"))
    if file is None or text(file) == "max":
        return None
    return None if number(file) >= NO_LIMIT_BYTES else number(file)
