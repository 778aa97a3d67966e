"""Resource use of ranks and hosts over time: sample kernel counters in an existing loop, and keep the records in
usage/*.jsonl of the run folder."""

import errno
import json
import logging
import operator
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Generic, TypeVar

import msgspec
import psutil
from msgspec import Meta, Struct
from msgspec.structs import asdict

from cputrain.affinity.terminal import printable

MAX_RECORDS = 600  # per worker or host, however long the run is
MAX_NUMBER = 1 << 62  # limit of every number in a record
MAX_INTERFACES = 8  # per host and record, the busiest: hosts of containers have hundreds
EVERY_S = 2.0
MAX_CORE_FRACTION = 0.003  # share of a core: after a slow sample (hundreds of processes) the next one comes later
CHILDREN_LISTED = Path(f"/proc/self/task/{threading.get_native_id()}/children").exists()
RDMA_WORD = 4  # bytes per count in port_rcv_data (InfiniBand Architecture Specification, volume 1, PortCounters)
logger = logging.getLogger(__name__)

Number = Annotated[float, Meta(ge=0, lt=MAX_NUMBER)]
Count = Annotated[int, Meta(ge=0, lt=MAX_NUMBER)]
Network = dict[str, tuple[Count, Count]]  # interface -> bytes received, bytes sent

FOLDER = "usage"  # in the run folder, beside the logs
MIN_PERIOD_S = 0.5  # the kernel counts CPU time in steps of 0.01 s
MERGE: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("time", "host"), lambda _earlier, later: later),
    **dict.fromkeys(("seconds", "cpu_s"), operator.add),
    **dict.fromkeys(("rss_bytes", "processes"), max),
    "memory_available_bytes": min,
    "network": lambda earlier, later: busiest(sum_networks(earlier, later)),
}
"""Field -> function that merges its values in two successive records."""


class WorkerUse(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resources used by a rank and all its descendant processes in the `seconds` before `time` (Unix).

    `cpu_s` is user and system time; `rss_bytes` the peak of their summed resident memory, where shared pages count once
    per process; `processes` the peak number of processes.
    """

    time: Number
    seconds: Number
    host: str
    cpu_s: Number
    rss_bytes: Count
    processes: Count


class HostUse(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resources used by all processes of a host in the `seconds` before `time` (Unix).

    `cpu_s` is the busy time of its PUs; `memory_available_bytes` the minimum of memory available for new allocations
    without swapping; `network` the bytes received and sent by interface, including loopback ("lo").
    """

    time: Number
    seconds: Number
    cpu_s: Number
    memory_available_bytes: Count
    network: Network


Use = TypeVar("Use", WorkerUse, HostUse)


def merged(earlier: Use, later: Use) -> Use:
    """Merge two successive records."""
    names = earlier.__struct_fields__
    return type(earlier)(**{name: MERGE[name](getattr(earlier, name), getattr(later, name)) for name in names})


def sum_networks(*parts: Mapping[str, tuple[int, int]]) -> Network:
    """Sum bytes by interface."""
    summed: Network = {}
    for part in parts:
        for name, (received, sent) in part.items():
            before = summed.get(name, (0, 0))
            summed[name] = (before[0] + received, before[1] + sent)
    return summed


def moved(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> Network:
    """Return bytes by interface between two readings, without interfaces that were idle, new or reset."""
    deltas = {
        name: (received - before[name][0], sent - before[name][1])
        for name, (received, sent) in after.items()
        if name in before
    }
    return busiest({name: both for name, both in deltas.items() if min(both) >= 0 and max(both) > 0})


def busiest(network: Mapping[str, tuple[int, int]]) -> Network:
    """Return the MAX_INTERFACES interfaces with the most bytes."""
    return dict(sorted(network.items(), key=lambda item: (-sum(item[1]), item[0]))[:MAX_INTERFACES])


def grouped(records: Iterable[Use], period_s: float) -> list[Use]:
    """Merge successive records until each covers at least the period; the last one may cover less."""
    merged_records: list[Use] = []
    for record in records:
        if merged_records and merged_records[-1].seconds < period_s:
            merged_records[-1] = merged(merged_records[-1], record)
        else:
            merged_records.append(record)
    return merged_records


def merge_records(records: Sequence[Use], limit: int = MAX_RECORDS) -> list[Use]:
    """Merge records of about equal length into at most `limit` / 2 + 1; no second, byte or peak is lost."""
    return grouped(records, fitting_period(records, limit))


def fitting_period(records: Iterable[Use], limit: int = MAX_RECORDS) -> float:
    """Return the seconds per record at which these records' total time fits into `limit` / 2 records."""
    return sum(record.seconds for record in records) / (limit // 2)


def to_line(record: Use) -> bytes:
    """Convert a record to a line of JSON, times rounded to milliseconds."""
    values = {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(record).items()}
    return json.dumps(values).encode() + b"\n"


def from_line(line: bytes, kind: type[Use]) -> Use:
    """Inverse of `to_line`. Raises ValueError if the line is truncated, damaged or of another kind."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:  # no ValueError in msgspec 0.19
        raise ValueError(str(error)) from None


def worker_file(folder: Path, rank: int) -> Path:
    """Path of a rank's records."""
    return folder / f"rank-{rank}.jsonl"


def host_file(folder: Path, host: str) -> Path:
    """Path of a host's records."""
    return folder / f"host-{host}.jsonl"


def read_usage_records(path: Path, kind: type[Use]) -> list[Use]:
    """Read a file's records, oldest first, up to the first damaged line (a crash can truncate one)."""
    records: list[Use] = []
    for line in path.read_bytes().splitlines():
        try:
            records.append(from_line(line, kind))
        except (ValueError, RecursionError):
            break
    return records


class UsageFile(Generic[Use]):
    """A file of at most MAX_RECORDS records: a full file is merged into half as many, longer records."""

    def __init__(self, path: Path, kind: type[Use]) -> None:
        self._path = path
        self._records: list[Use] = read_usage_records(path, kind) if path.is_file() else []
        self._pending: Use | None = None
        self._period_s = MIN_PERIOD_S
        self._file = self._rewritten()

    def add(self, record: Use) -> None:
        """Add a record; it is written once it covers as much time as each record in the file."""
        self._pending = record if self._pending is None else merged(self._pending, record)
        if self._pending.seconds >= self._period_s:
            self._flush()

    def close(self) -> None:
        """Write the pending record; merge it into the last one if it is too short for meaningful rates."""
        if self._pending is not None and self._records and self._pending.seconds < self._period_s:
            self._records[-1] = merged(self._records[-1], self._pending)
            self._pending = None
            self._rewrite()
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        if self._pending is None:
            return
        line = to_line(self._pending)
        self._records.append(self._pending)
        self._pending = None
        if self._file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        if len(self._records) >= MAX_RECORDS:
            self._rewrite()

    def _rewrite(self) -> None:
        before, self._file = self._file, self._rewritten()
        before.close()

    def _rewritten(self) -> BinaryIO:
        """Rewrite the file without truncated lines, thinned if it is too long, and open it for appending."""
        if len(self._records) > MAX_RECORDS // 2:
            self._period_s = max(self._period_s, fitting_period(self._records))
            self._records = merge_records(self._records)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}.partial")
        try:
            beside.write_bytes(b"".join(map(to_line, self._records)))
            beside.rename(self._path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        return self._path.open("ab", buffering=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A process and all its descendants: CPU seconds since their start, including ended children; resident memory;
    number of processes."""

    cpu_s: float = 0.0
    rss_bytes: int = 0
    processes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCounters:
    """A host's counters since boot, and its available memory."""

    cpu_s: float
    memory_available_bytes: int
    network: Network


class Sampler:
    """Write folder/rank-N.jsonl for each rank and, with `whole_host`, host-NAME.jsonl.

    Use counts from now, also that of the ranks of `pids` (rank -> process); ranks that this process starts are added
    with `started`. Sampling takes less than MAX_CORE_FRACTION of a core. If a file cannot be written or a counter
    cannot be read, a warning is logged and the run continues without sampling.
    """

    def __init__(self, folder: Path, pids: Mapping[int, int], *, whole_host: bool) -> None:
        self._host = socket.gethostname()
        self._folder, self._pids = folder, dict(pids)
        spent, self._at = time.thread_time(), time.monotonic()
        self._reaped_s = _reaped_s()
        self._off = False
        try:
            self._trees = {rank: read_tree(pid) for rank, pid in pids.items()}
            self._counters = read_host() if whole_host else None
            self._wait(spent)
            self._workers = {rank: UsageFile(worker_file(folder, rank), WorkerUse) for rank in pids}
            self._whole = UsageFile(host_file(folder, self._host), HostUse) if whole_host else None
        except OSError as error:
            self._give_up(error)

    def started(self, rank: int, pid: int) -> None:
        """Add a rank that this process has just started. All of its use counts, as a command of a moment can be over
        before it is first read."""
        self._pids[rank] = pid
        if not self._off:
            try:
                self._trees[rank] = replace(read_tree(pid), cpu_s=0.0)
                self._workers[rank] = UsageFile(worker_file(self._folder, rank), WorkerUse)
            except OSError as error:
                self._give_up(error)

    def tick(self) -> None:
        """Take a sample if one is due."""
        if not self._off and time.monotonic() >= self._due:
            self._sample()

    def ended(self, rank: int) -> None:
        """Record the end of a rank: a child of this process that was just waited for."""
        total = _reaped_s() - self._reaped_s
        self._reaped_s += total
        del self._pids[rank]
        if not self._off:
            try:
                self._add(rank, self._trees.pop(rank), Tree(cpu_s=total), time.monotonic() - self._at)
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Take the last sample, of running ranks and the host, and write all files."""
        if not self._off:
            self._sample()
        if self._off:
            return
        try:
            for file in (*self._workers.values(), *((self._whole,) if self._whole else ())):
                file.close()
        except OSError as error:
            self._give_up(error)

    def _sample(self) -> None:
        spent, now = time.thread_time(), time.monotonic()
        seconds = now - self._at
        try:
            trees = {rank: tree for rank, pid in self._pids.items() if (tree := read_tree(pid)).processes}
            for rank, tree in trees.items():
                self._add(rank, self._trees[rank], tree, seconds)
            if self._counters is not None and self._whole is not None:
                counters = read_host()
                self._whole.add(host_use(self._counters, counters, seconds))
                self._counters = counters
        except OSError as error:
            self._give_up(error)
            return
        self._at = now
        self._trees |= trees
        self._wait(spent)

    def _wait(self, spent: float) -> None:
        """Schedule the next sample; `spent` is this thread's CPU time when the last one began."""
        self._due = self._at + max(EVERY_S, (time.thread_time() - spent) / MAX_CORE_FRACTION)

    def _add(self, rank: int, before: Tree, after: Tree, seconds: float) -> None:
        use = WorkerUse(
            time=time.time(),
            seconds=seconds,
            host=self._host,
            cpu_s=max(0.0, after.cpu_s - before.cpu_s),
            rss_bytes=max(before.rss_bytes, after.rss_bytes),
            processes=max(before.processes, after.processes),
        )
        self._workers[rank].add(use)

    def _give_up(self, error: OSError) -> None:
        self._off = True
        where = error.filename or "usage"
        logger.warning("cputrain: %s: %s; the run continues without recording resource use", where, error.strerror)


def host_use(before: HostCounters, after: HostCounters, seconds: float) -> HostUse:
    """Return a host's resource use between two readings."""
    return HostUse(
        time=time.time(),
        seconds=seconds,
        cpu_s=max(0.0, after.cpu_s - before.cpu_s),
        memory_available_bytes=min(before.memory_available_bytes, after.memory_available_bytes),
        network=moved(before.network, after.network),
    )


def read_tree(root: int) -> Tree:
    """Read a process and all its descendants; no processes if it has ended."""
    tree, waiting = Tree(), [root]
    while waiting:
        pid = waiting.pop()
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                cpu, rss = sum(process.cpu_times()[:4]), process.memory_info().rss  # ended children included
            waiting += children_of(pid)
        except psutil.Error:  # ended meanwhile, or belongs to another user
            continue
        tree = Tree(cpu_s=tree.cpu_s + cpu, rss_bytes=tree.rss_bytes + rss, processes=tree.processes + 1)
    return tree


def children_of(pid: int) -> list[int]:
    """Return a process's children from the kernel's per-thread lists if it has them: psutil scans all processes of the
    host, which are thousands on a large one."""
    pids: list[int] = []
    if not CHILDREN_LISTED:
        with suppress(psutil.Error):
            pids = [child.pid for child in psutil.Process(pid).children()]
        return pids
    with suppress(OSError):  # the process ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread ended meanwhile
                pids += map(int, (thread / "children").read_text(encoding="utf-8").split())
    return pids


def read_host(root: Path = Path("/")) -> HostCounters:
    """Read this host's counters. RDMA traffic, which network interfaces do not count, is read below `root`."""
    cpu = psutil.cpu_times()
    interfaces = psutil.net_io_counters(pernic=True)
    return HostCounters(
        cpu_s=cpu.user + cpu.nice + cpu.system + cpu.irq + cpu.softirq,
        memory_available_bytes=psutil.virtual_memory().available,
        network={
            **{printable(name): (io.bytes_recv, io.bytes_sent) for name, io in interfaces.items()},
            **read_rdma(root),
        },
    )


def read_rdma(root: Path) -> Network:
    """Return bytes received and sent by each RDMA port (InfiniBand, Omni-Path, RoCE) below a file system's root."""
    by_interface: Network = {}
    for counters in sorted(root.glob("sys/class/infiniband/*/ports/*/counters")):
        try:
            both = [
                int((counters / f"port_{way}_data").read_text(encoding="utf-8")) * RDMA_WORD for way in ("rcv", "xmit")
            ]
        except (OSError, ValueError):
            continue  # a port without counters
        by_interface[f"{counters.parents[2].name}:{counters.parent.name} (RDMA)"] = (both[0], both[1])
    return by_interface


def _reaped_s() -> float:
    """Return the CPU seconds of this process's children that have ended and been waited for, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
