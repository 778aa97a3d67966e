"""Kills for lack of memory, as the kernel counts them for this process's control groups and for the host."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import InputError
from affinity.topology.cgroup import own_folders, read_limits
from affinity.units import GIB

COUNTERS = ("memory.events", "memory.oom_control")  # of control groups v2, v1: a line "oom_kill N"
COUNTER = "oom_kill "


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A process was killed for lack of memory: the most that it had, 0 if unknown, and all that there is, in bytes.

    `whole` is what that is the memory of.
    """

    used_bytes: int
    limit_bytes: int
    whole: str

    def __str__(self) -> str:
        used = f"{self.used_bytes / GIB:.1f} GiB of " if self.used_bytes else ""
        return f"out of memory: {used}the {self.limit_bytes / GIB:.1f} GiB of its {self.whole}"


class KillCounter:
    """Tells whether the kernel has lately killed a process of this one's control groups for lack of memory.

    To be read every few seconds. Files are below `root`. Where no control group counts, the host's own count is taken,
    of all processes.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        names = [folder / name for folder in own_folders(root) for name in COUNTERS]
        files = [path for path in names if read_count(path) is not None]
        self._files = files or [root / "proc/vmstat"]
        self._before = self._last = self._counts()

    def read(self) -> None:
        """Count anew: kills before the reading before this one are no longer lately."""
        self._before, self._last = self._last, self._counts()

    def shortage(self, used_bytes: int) -> Shortage | None:
        """The shortage of a process that has just been killed, if that was why; it had so many bytes at most."""
        if all(now <= before for now, before in zip(self._counts(), self._before, strict=True)):
            return None
        limit = None
        with suppress(InputError):  # a file of the control group that is not as expected
            limit = read_limits(self._root).memory_bytes
        if limit is not None:
            return Shortage(used_bytes=used_bytes, limit_bytes=limit, whole="control group")
        return Shortage(used_bytes=used_bytes, limit_bytes=_host_bytes(self._root), whole="host")

    def _counts(self) -> list[int]:
        return [read_count(path) or 0 for path in self._files]


def read_count(path: Path) -> int | None:
    """The kills that a file counts; None where it does not."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(COUNTER)), None)


def _host_bytes(root: Path) -> int:
    lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
