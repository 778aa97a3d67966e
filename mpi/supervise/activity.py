"""What a rank on this host does, from outside: its demand for CPU time, and the collective of its heartbeats.

Time that a thread waits for a core counts as computing, because a shared host may give it little CPU time; but only up
to a multiple of its CPU time, which is small for one that polls, as it may wait for a core each time.
"""

import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from msgspec import MsgspecError, Struct, json, structs

from cputrain.affinity.filesystem import read_stat
from cputrain.mpi.supervise.wire import HEARTBEAT_S, Activity
from cputrain.mpi.usage import children_of

READ_S = 1.0  # between two readings of a rank
# A rank with less demand is waiting; heartbeats, progress bars and torch's store take some CPU time, and on a crowded
# host some more for a second.
IDLE_CORES, IDLE_READINGS = 0.2, 3
BUSY_CORES = 0.5  # a rank with more demand is computing
STOPPED = "T"  # stopped by a signal, not by a debugger (state "t"): proc(5), /proc/PID/stat
# A computing thread keeps a core until the scheduler takes it away, mostly for milliseconds; one that polls, such as
# for the interpreter's lock 200 times a second, gives it back after a fraction of one.
COMPUTES_S = 1e-3
WAITS_PER_CPU, WAITS_PER_POLL = 12.0, 4.0  # what a thread's waiting counts at most, as a multiple of its CPU time
NANOSECOND_S = 1e-9
MAX_HEARTBEAT_BYTES = 1 << 20  # of a heartbeat
SILENT_S = 3 * HEARTBEAT_S  # since a heartbeat, after which it does not tell what the rank does now


@dataclass(frozen=True, slots=True)
class ThreadTime:
    """A thread's CPU time and its waiting for a core in seconds, and how often it got one: schedstat of Linux."""

    cpu_s: float = 0.0
    waited_s: float = 0.0
    turns: int = 0

    def waiting_since(self, before: "ThreadTime") -> float:
        """Return how much of its waiting since an earlier reading counts as computing, in seconds."""
        used_s, turns = self.cpu_s - before.cpu_s, self.turns - before.turns
        limit = WAITS_PER_CPU if used_s >= COMPUTES_S * turns else WAITS_PER_POLL
        return min(self.waited_s - before.waited_s, limit * used_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTime:
    """CPU time of one or more processes in seconds, with ended children's, the times of their threads, or of their main
    threads alone, by number, and whether one of the processes is stopped."""

    cpu_s: float
    threads: Mapping[str, ThreadTime]
    stopped: bool

    def demand_since(self, before: "ProcessTime") -> float:
        """Return the demand for CPU time since an earlier reading, in seconds."""
        waited_s = (time.waiting_since(before.threads.get(key, ThreadTime())) for key, time in self.threads.items())
        return max(0.0, self.cpu_s - before.cpu_s) + sum(waited_s)


class Heartbeat(Struct, frozen=True, kw_only=True):
    """The fields that are read of a rank's heartbeat: see StoreHeartbeat in cputrain/comm/watchdog.py."""

    count: int
    waits_in: str | None
    group: str
    number: int
    waited_s: float
    groups: dict[str, list[tuple[int, int, int]]]


class ActivityMeter:
    """Measure the activity of the rank whose first process is `pid`. Times are in seconds of one clock.

    Other threads and descendants are read only while that process itself is not busy: one that waits for a child, such
    as a shell, or for a thread that reads data, is as busy as these. The rank copies its heartbeats to the open file
    `state`; None if it has no such file.
    """

    def __init__(self, pid: int, now: float, state: int | None = None) -> None:
        self._pid, self._state = pid, state
        self._at = self._idle_since = self._busy_since = now
        self._stopped_since: float | None = None
        self._root = read_process(pid)
        self._tree: ProcessTime | None = None
        self._demands: deque[float] = deque(maxlen=IDLE_READINGS)  # cores, in the latest readings
        self._beat: Heartbeat | None = None
        self._beat_at = now
        self.activity = Activity()

    def read(self, now: float) -> None:
        """Take a reading if one is due; a process that has ended keeps its last one."""
        if now - self._at < READ_S or (root := read_process(self._pid)) is None:
            return
        seconds = now - self._at
        demand = root.demand_since(self._root) if self._root else 0.0
        tree = read_tree(self._pid) if demand < BUSY_CORES * seconds else None
        if tree is not None and self._tree is not None:
            demand = tree.demand_since(self._tree)
            idle, busy = demand < IDLE_CORES * seconds, demand >= BUSY_CORES * seconds
            self._demands.append(demand / seconds)
            idle = idle or (len(self._demands) == IDLE_READINGS and fmean(self._demands) < IDLE_CORES)
        else:  # nothing is known about threads and children yet
            self._demands.clear()
            idle, busy = False, tree is None
        self._idle_since = self._idle_since if idle else now
        self._busy_since = self._busy_since if busy else now
        if not (root.stopped or (idle and tree is not None and tree.stopped)):
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = self._at
        elif root.stopped and self._root and root.cpu_s > self._root.cpu_s:  # it ran, and was stopped again
            self._stopped_since = now
        self._at, self._root, self._tree = now, root, tree
        activity = Activity(
            stopped_s=0.0 if self._stopped_since is None else now - self._stopped_since,
            idle_s=now - self._idle_since,
            busy_s=now - self._busy_since,
        )
        beat = read_heartbeat(self._state) or self._beat
        if beat and (self._beat is None or beat.count != self._beat.count):
            self._beat, self._beat_at = beat, now
        self.activity = with_collective(activity, self._beat, silent=now - self._beat_at > SILENT_S)


def with_collective(activity: Activity, heartbeat: Heartbeat | None, *, silent: bool) -> Activity:
    """Return a rank's activity with what its last heartbeat says: the collectives that it has called, and unless it has
    been `silent` since (it is frozen, or has left), the one in which it waits."""
    if heartbeat is None:
        return activity
    calls = tuple((key, called[0][0]) for key, called in heartbeat.groups.items() if called)
    if silent:
        return structs.replace(activity, calls=calls)
    return structs.replace(
        activity,
        collective=heartbeat.waits_in or "",
        waited_s=heartbeat.waited_s,
        group=heartbeat.group,
        number=heartbeat.number,
        calls=calls,
    )


def read_heartbeat(file: int | None) -> Heartbeat | None:
    """Return the heartbeat in a rank's file; None without one, or while it is being written."""
    text = b"" if file is None else os.pread(file, MAX_HEARTBEAT_BYTES, 0).partition(b"\n")[0]
    try:
        return json.decode(text, type=Heartbeat) if text else None
    except MsgspecError:
        return None


def read_process(pid: int, *, all_threads: bool = False) -> ProcessTime | None:
    """Read a process's times, with those of its main thread or of all its threads; None if it has ended."""
    try:
        stat = read_stat(pid)
    except OSError:
        return None
    if stat.state in "ZX":
        return None
    times, tasks = dict[str, ThreadTime](), Path(f"/proc/{pid}/task")
    with suppress(OSError):  # ended meanwhile, as each of its threads may have
        for thread in tasks.iterdir() if all_threads else (tasks / str(pid),):
            with suppress(OSError, ValueError):  # a kernel without scheduler statistics has no numbers
                cpu, waited, turns = map(int, (thread / "schedstat").read_text(encoding="utf-8").split())
                times[thread.name] = ThreadTime(cpu * NANOSECOND_S, waited * NANOSECOND_S, turns)
    return ProcessTime(cpu_s=stat.cpu_s, threads=times, stopped=stat.state == STOPPED)


def process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants, parents before children."""
    pids = [pid]
    for parent in pids:
        with suppress(OSError):  # ended meanwhile
            pids += children_of(parent)
    return pids


def read_tree(pid: int) -> ProcessTime:
    """Return the times of this process and all its descendants, with those of all their threads."""
    read = [process for each in process_tree(pid) if (process := read_process(each, all_threads=True))]
    return ProcessTime(
        cpu_s=sum(process.cpu_s for process in read),
        threads={number: time for process in read for number, time in process.threads.items()},
        stopped=any(process.stopped for process in read),
    )
