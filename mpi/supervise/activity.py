"""What a rank is doing, as the kernel tells: computing, idle or stopped, and for how long.

The time for which a process waits for a core counts as computing: on a host that is shared, it may get little of one.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from affinity.process_stat import read_stat
from mpi.usage.sampler import children_of

READ_S = 2.0  # between two readings of a rank
IDLE_CORES = 0.05  # a rank that wants less waits for something; heartbeats and progress bars take some
BUSY_CORES = 0.5  # a rank that wants more computes
STOPPED = "T"  # by a signal, not by a debugger, in which somebody looks at it: proc(5), /proc/PID/stat
NANOSECOND_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """For how many seconds, up to its last reading, a rank has been stopped, idle or busy without a break."""

    stopped_s: float = 0.0
    idle_s: float = 0.0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTime:
    """The CPU seconds that a process, or several, have had, with those of ended children, and for which their main
    threads have waited; whether one of them is stopped."""

    wanted_s: float
    stopped: bool


class ActivityMeter:
    """Follows the rank whose first process is `pid`. The times are those of one clock, in seconds.

    What that process has started is looked at only while it is idle itself: one that waits for a child, as a shell
    does, is as busy as the child.
    """

    def __init__(self, pid: int, now: float) -> None:
        self._pid = pid
        self._at = self._idle_since = self._busy_since = now
        self._stopped_since: float | None = None
        self._root = read_process(pid)
        self._below: ProcessTime | None = None
        self.activity = Activity()

    def read(self, now: float) -> None:
        """Take a reading where one is due; a process that has ended keeps its last one."""
        if now - self._at < READ_S or (root := read_process(self._pid)) is None:
            return
        seconds = now - self._at
        wanted = root.wanted_s - self._root.wanted_s if self._root else 0.0
        below = read_below(self._pid) if wanted < IDLE_CORES * seconds else None
        if below is not None and self._below is not None:
            wanted += max(0.0, below.wanted_s - self._below.wanted_s)
            idle, busy = wanted < IDLE_CORES * seconds, wanted >= BUSY_CORES * seconds
        else:  # of the children nothing is known yet
            idle, busy = False, below is None and wanted >= BUSY_CORES * seconds
        self._idle_since = self._idle_since if idle else now
        self._busy_since = self._busy_since if busy else now
        stopped = root.stopped or (idle and below is not None and below.stopped)
        self._stopped_since = (self._stopped_since or self._at) if stopped else None
        self._at, self._root, self._below = now, root, below
        self.activity = Activity(
            stopped_s=0.0 if self._stopped_since is None else now - self._stopped_since,
            idle_s=now - self._idle_since,
            busy_s=now - self._busy_since,
        )


def read_process(pid: int) -> ProcessTime | None:
    """A process's time; None where it has ended."""
    try:
        stat = read_stat(pid)
    except OSError:
        return None
    if stat.state in "ZX":
        return None
    waited_s = 0.0
    with suppress(OSError, IndexError):  # a kernel without these statistics
        waited_s = int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[1]) * NANOSECOND_S
    return ProcessTime(wanted_s=stat.cpu_s + waited_s, stopped=stat.state == STOPPED)


def tree(pid: int) -> list[int]:
    """A process and all below it, parents before their children."""
    found = [pid]
    for one in found:
        with suppress(OSError):  # has ended meanwhile
            found += children_of(one)
    return found


def read_below(pid: int) -> ProcessTime:
    """The time of all processes below this one together."""
    read = [one for child in tree(pid)[1:] if (one := read_process(child))]
    return ProcessTime(wanted_s=sum(one.wanted_s for one in read), stopped=any(one.stopped for one in read))
