"""Read the kernel's small files (texts, numbers, sets of ids), and limits of control groups and cpusets from them.

Every error names its file. Cgroup v2, v1 and legacy cpusets are read at the mount points in /proc/mounts.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import OCTAL
from cputrain.affinity.topology.machine import parse_list, parse_mask

MAX_FILE_BYTES = 1 << 24  # /proc/cpuinfo of 4,096 CPUs has 6 MB; everything else is far smaller
NUMBER = re.compile(r"-?[0-9]{1,20}")
NO_SET = "(null)"  # printed by kernels for a set that is not allocated (prometheus/node_exporter#3152)

# The default mount points, for unpacked trees without /proc/mounts.
USUAL_MOUNTS = (
    ("v2", "/sys/fs/cgroup"),
    ("v2", "/sys/fs/cgroup/unified"),
    ("v1", "/sys/fs/cgroup/cpuset"),
    ("legacy", "/dev/cpuset"),
)
CPUS = {"v2": "cpuset.cpus.effective", "v1": "cpuset.cpus", "legacy": "cpus"}
MEMS = {"v2": "cpuset.mems.effective", "v1": "cpuset.mems", "legacy": "mems"}
PARTITION, ISOLATED = "cpuset.cpus.partition", "isolated"  # "isolated invalid (...)" is not isolated
LIMIT_FILES = (
    *CPUS.values(),
    *MEMS.values(),
    PARTITION,
    *("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us", "memory.max", "memory.limit_in_bytes"),
)
NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63


def first_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    """Return the first of these files that exists in the folder; None if none does."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def numbered_entries(folder: Path, prefix: str) -> dict[int, Path]:
    """Return a folder's numbered entries, such as "cpu12" for the prefix "cpu", by number."""
    paths = {path.name.removeprefix(prefix): path for path in folder.glob(f"{prefix}[0-9]*")}
    return {int(name): paths[name] for name in sorted(paths, key=len) if re.fullmatch("0|[1-9][0-9]{0,8}", name)}


def read_text(path: Path, around: str = " \t\r\n\0") -> str:
    """Read a file's text and strip blanks, line ends and NUL bytes. Raises InputError if it cannot be read."""
    data = bytearray()
    try:
        with path.open("rb") as file:
            # In chunks: for one large read the kernel would allocate that much memory, and refuses it under proc/sys.
            while len(data) <= MAX_FILE_BYTES and (part := file.read(1 << 16)):
                data += part
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise InputError(
            f"{path} has more than {MAX_FILE_BYTES >> 20} MiB, unlike the kernel's files: copy the tree again"
        )
    return data.decode(errors="replace").strip(around)


def read_ids(path: Path) -> tuple[int, ...]:
    """Read the ids in a list file (...list, online, cpus) or a mask file. Raises InputError on anything else."""
    if read_text(path) == NO_SET:
        return ()
    is_list = path.name.endswith("list") or path.name in ("online", "cpus", "isolated")
    try:
        return parse_list(read_text(path)) if is_list else parse_mask(read_text(path))
    except ValueError:
        raise InputError(f"{path} contains {_start(path)}, which is not a set of ids: copy the tree again") from None


def read_number(path: Path) -> int:
    """Read a file's number. Raises InputError on anything else."""
    if NUMBER.fullmatch(read_text(path)) is None:
        raise InputError(f"{path} contains {_start(path)}, which is not a number: copy the tree again")
    return int(read_text(path))


def number_if_any(path: Path) -> int | None:
    """Read a file's number; None if the file is missing, unreadable or contains another text ("<unknown>")."""
    try:
        content = read_text(path) if path.is_file() else ""
    except InputError:  # the kernel's drivers return I/O errors if the firmware has no value
        return None
    return int(content) if NUMBER.fullmatch(content) else None


def read_numbers(path: Path) -> tuple[int, ...]:
    """Read a file's numbers, separated by spaces. Raises InputError on anything else."""
    words = read_text(path).split()
    if not all(NUMBER.fullmatch(word) for word in words):
        raise InputError(f"{path} contains {_start(path)}, which is not a row of numbers: copy the tree again")
    return tuple(map(int, words))


def read_rows(path: Path, columns: int, separator: str | None = None) -> tuple[tuple[str, ...], ...]:
    """Split a file's lines into columns; empty if the file is missing. Raises InputError at a shorter line."""
    lines = read_text(path, "\r\n\0").splitlines() if path.is_file() else ()  # a first column may be empty
    split = tuple(tuple(line.split(separator, columns - 1)) for line in lines if line.strip())
    short = next((row for row in split if len(row) < columns), None)
    if short is not None:
        line = repr(" ".join(short)[:40])
        raise InputError(f"{path} contains the line {line} with fewer than {columns} columns: copy the tree again")
    return split


def _start(path: Path) -> str:
    return repr(read_text(path)[:40])


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Allowed PUs and NUMA nodes, CPU time in CPUs, bytes of memory; None means no limit.

    `isolated`: the PUs are an isolated cpuset partition, in which the scheduler moves no threads.
    """

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
    """Read the limits of the process whose /proc/self is under root. Raises InputError with the name of a bad file."""
    groups = _cgroups_of_process(root)
    cpusets: list[tuple[Path, str]] = []
    quotas: list[float] = []
    memory: list[int] = []
    for mount in _mounts(root):
        folders = _upwards(mount.path, groups.get(mount.version, groups.get("cpuset", "/")))
        if mount.version != "v1" or "cpuset" in mount.controllers:
            cpusets += [(folder, mount.version) for folder in folders]
        for controller in mount.controllers or (("cpu", "memory") if mount.version == "v2" else ()):
            cgroup_folders = folders if mount.version == "v2" else _upwards(mount.path, groups.get(controller, "/"))
            if controller == "cpu":
                quotas += [quota for folder in cgroup_folders if (quota := _quota(folder)) is not None]
            if controller == "memory":
                memory += [limit for folder in cgroup_folders if (limit := _memory_limit(folder)) is not None]
    return Limits(
        pus=_innermost(cpusets, CPUS),
        nodes=_innermost(cpusets, MEMS),
        cpu_quota=min(quotas, default=None),
        memory_bytes=min(memory, default=None),
        isolated=any(
            (folder / PARTITION).is_file() and read_text(folder / PARTITION) == ISOLATED for folder, _ in cpusets
        ),
    )


def limit_files(root: Path) -> tuple[Path, ...]:
    """List the control groups' files that `read_limits` may read."""
    return tuple(folder / name for folder in cgroup_folders(root) for name in LIMIT_FILES if (folder / name).is_file())


def cgroup_folders(root: Path) -> tuple[Path, ...]:
    """Return the folders of the process's control groups and their parents, sorted."""
    groups = _cgroups_of_process(root)
    folders = {
        folder
        for mount in _mounts(root)
        for name in (mount.version, "cpuset", *mount.controllers)
        if name in groups
        for folder in _upwards(mount.path, groups[name])
    }
    return tuple(sorted(folders))


def _mounts(root: Path) -> list[Mount]:
    limits = {
        mount: Mount(version=version, path=root / mount.lstrip("/"), controllers=()) for version, mount in USUAL_MOUNTS
    }
    for _, where, file_system, options, *_ in read_rows(root / "proc/mounts", 6, " "):  # a source may be empty
        names = tuple(options.split(","))
        path = root / OCTAL.sub(lambda code: chr(int(code[1], 8)), where).lstrip("/")  # proc(5): a blank is \\040
        if file_system == "cgroup2":
            limits[where] = Mount(version="v2", path=path, controllers=())
        elif file_system == "cpuset" or (file_system == "cgroup" and {"cpuset", "noprefix"} <= set(names)):
            limits[where] = Mount(version="legacy", path=path, controllers=("cpuset",))
        elif file_system == "cgroup":
            limits[where] = Mount(version="v1", path=path, controllers=names)
    # Default mount points that are not in proc/mounts are assumed to be of their default version.
    return [
        replace(mount, controllers=("cpuset",)) if mount.version == "v1" and not mount.controllers else mount
        for mount in limits.values()
        if os.path.isdir(mount.path)  # noqa: PTH112  Path.is_dir raises if a parent folder may not be searched
    ]


def _cgroups_of_process(root: Path) -> dict[str, str]:
    """Map controllers (or "v2", "legacy") to this process's group in their hierarchy."""
    groups: dict[str, str] = {}
    cpuset = root / "proc/self/cpuset"
    for hierarchy, controllers, group in read_rows(root / "proc/self/cgroup", 3, ":"):
        if hierarchy == "0" and not controllers:
            groups["v2"] = group
        groups |= dict.fromkeys(filter(None, controllers.split(",")), group)
    if cpuset.is_file():
        groups["legacy"] = read_text(cpuset)
        groups.setdefault("cpuset", groups["legacy"])
    return groups


def _upwards(mount: Path, group: str) -> list[Path]:
    """Return the group's folder and its parents, innermost first; for a group outside the mount (".." in a container)
    the mount itself."""
    parts = [part for part in PurePosixPath(group).parts if part not in ("/", "..")]
    return [mount.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _innermost(cpusets: list[tuple[Path, str]], names: dict[str, str]) -> tuple[int, ...] | None:
    """Read the ids in the innermost file that is not empty: new v1 and legacy groups have empty files."""
    for folder, version in cpusets:
        file = folder / names[version]
        if file.is_file() and read_text(file):
            try:
                return parse_list(read_text(file))
            except ValueError:
                raise InputError(
                    f"{file} contains {read_text(file)[:40]!r}, which is not a list of ids: copy the tree again"
                ) from None
    return None


def _quota(folder: Path) -> float | None:
    """Read a group's CPU quota in CPUs: quota / period."""
    v2, v1 = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if v2.is_file():
        quota, period = (*read_text(v2).split(), "100000", "")[:2]
        if quota == "max":
            return None
        if not (NUMBER.fullmatch(quota) and NUMBER.fullmatch(period) and int(quota) > 0 and int(period) > 0):
            raise InputError(
                f"{v2} contains {read_text(v2)[:40]!r}, which is not a quota and a period: copy the tree again"
            )
        return int(quota) / int(period)
    if v1.is_file() and read_number(v1) > 0:
        return read_number(v1) / max(read_number(folder / "cpu.cfs_period_us"), 1)
    return None


def _memory_limit(folder: Path) -> int | None:
    file = first_file(folder, ("memory.max", "memory.limit_in_bytes"))
    if file is None or read_text(file) == "max":
        return None
    return None if read_number(file) >= NO_LIMIT_BYTES else read_number(file)
