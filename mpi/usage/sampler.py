"""Samples what ranks and their host use, for the run's folder; called in a loop that runs anyway."""

import logging
import resource
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from cputrain.affinity.terminal import printable
from cputrain.mpi.usage.records import HostUse, Network, UsageFile, WorkerUse, host_file, moved, worker_file

EVERY_S = 2.0
MOST_OF_A_CORE = 0.003  # a sample that takes long, of ranks with hundreds of processes, makes the next one wait
CHILDREN_LISTED = Path(f"/proc/self/task/{threading.get_native_id()}/children").exists()
RDMA_WORD = 4  # bytes that a count of port_rcv_data stands for (InfiniBand Architecture, volume 1, PortCounters)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A process and all below it: CPU seconds since its start, with those of children that have ended; resident
    memory; number."""

    cpu_s: float = 0.0
    rss_bytes: int = 0
    processes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCounters:
    """A host's counters since its start, and the memory that is available now."""

    cpu_s: float
    memory_available_bytes: int
    network: Network


class Sampler:
    """Writes folder/rank-N.jsonl for each rank of `pids` (rank -> process) and, with `whole_host`, host-NAME.jsonl.

    Takes less than MOST_OF_A_CORE of a core. A file that cannot be written, or a counter that cannot be read, is
    reported, and the run goes on without sampling.
    """

    def __init__(self, folder: Path, pids: Mapping[int, int], *, whole_host: bool) -> None:
        self._host = socket.gethostname()
        self._pids = dict(pids)
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

    def tick(self) -> None:
        """Take a sample where one is due."""
        if not self._off and time.monotonic() >= self._due:
            self._sample()

    def ended(self, rank: int) -> None:
        """Record the end of a rank, a child of this process that it has just waited for."""
        total = _reaped_s() - self._reaped_s
        self._reaped_s += total
        del self._pids[rank]
        if not self._off:
            try:
                self._add(rank, self._trees.pop(rank), Tree(cpu_s=total), time.monotonic() - self._at)
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Take the last sample, of what still runs and of the host, and write all."""
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
        """Set when the next sample is due, after one that began at `spent` of this thread's CPU time."""
        self._due = self._at + max(EVERY_S, (time.thread_time() - spent) / MOST_OF_A_CORE)

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
        logger.warning(
            "cputrain: %s: %s: the run goes on, its resource use unknown", error.filename or "usage", error.strerror
        )


def host_use(before: HostCounters, after: HostCounters, seconds: float) -> HostUse:
    """What a host used between two readings."""
    return HostUse(
        time=time.time(),
        seconds=seconds,
        cpu_s=max(0.0, after.cpu_s - before.cpu_s),
        memory_available_bytes=min(before.memory_available_bytes, after.memory_available_bytes),
        network=moved(before.network, after.network),
    )


def read_tree(root: int) -> Tree:
    """A process and all below it now; no processes where it has ended."""
    tree, waiting = Tree(), [root]
    while waiting:
        pid = waiting.pop()
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                cpu, rss = sum(process.cpu_times()[:4]), process.memory_info().rss  # with ended children's
            waiting += children_of(pid)
        except psutil.Error:  # has ended meanwhile, or is another user's
            continue
        tree = Tree(cpu_s=tree.cpu_s + cpu, rss_bytes=tree.rss_bytes + rss, processes=tree.processes + 1)
    return tree


def children_of(pid: int) -> list[int]:
    """A process's children as the kernel lists them for each of its threads, where it does: psutil looks at all
    processes of the host, thousands on one of many cores."""
    found: list[int] = []
    if not CHILDREN_LISTED:
        with suppress(psutil.Error):
            found = [child.pid for child in psutil.Process(pid).children()]
        return found
    with suppress(OSError):  # the process has ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has
                found += map(int, (thread / "children").read_text(encoding="utf-8").split())
    return found


def read_host(root: Path = Path("/")) -> HostCounters:
    """This host's counters. RDMA, which no network interface counts, is read below `root`."""
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
    """Bytes received and sent by each RDMA port (InfiniBand, Omni-Path, RoCE) below a file system's root."""
    found: Network = {}
    for counters in sorted(root.glob("sys/class/infiniband/*/ports/*/counters")):
        try:
            both = [
                int((counters / f"port_{way}_data").read_text(encoding="utf-8")) * RDMA_WORD for way in ("rcv", "xmit")
            ]
        except (OSError, ValueError):
            continue  # a port that counts nothing
        found[f"{counters.parents[2].name}:{counters.parent.name} (RDMA)"] = (both[0], both[1])
    return found


def _reaped_s() -> float:
    """CPU seconds of this process's children that have ended and were waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
