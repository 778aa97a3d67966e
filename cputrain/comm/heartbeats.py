"""Heartbeats: what a rank says of itself through the job's store, and what follows for ranks that say nothing."""

import json
import math
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import NamedTuple

from affinity.process_stat import PROC, read_stat
from affinity.wording import first_named
from cputrain.comm.store import SignedKeys
from mpi.supervise.connection import HEARTBEAT_S, HEARTBEAT_TIMEOUT_S

NOT_SCHEDULED = frozenset("TZXx")  # stopped, dead: proc(5), /proc/PID/stat; one in a debugger is in somebody's hands
MOST_WATCHED = 16
STOPPED_TIMEOUT_S = 6.0  # of silence of a rank of this host of which the kernel says that it is stopped or dead


class PendingCollective(NamedTuple):
    """The collective that a rank waits in ("": none), and the seconds since its timeout.

    `group` is the collective's group ("": unknown), `number` counts the group's collectives, and `digest` tells whether
    two ranks have called the same ones up to this number.
    """

    name: str
    overdue_s: float = 0.0
    group: str = ""
    number: int = 0
    digest: int = 0

    @property
    def is_destruction(self) -> bool:
        """Whether the group is being destroyed, as a rank does that leaves the job."""
        return self.name.startswith("the destruction of ")  # as native/backend.cpp names it


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlace:
    """Where a rank runs: its host, the kernel and PID namespace in which its process has this PID and start time.

    `native`: its heartbeats come from a thread that needs no Python, so they stop only with the process.
    """

    host: str
    kernel: str
    pid: int
    started: int
    native: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHeartbeat(ProcessPlace):
    """A rank's heartbeat: `waits_in` is the collective that the rank waits in.

    `groups` has the number and the digest (PendingCollective) of the last collective that it has called in each group,
    then those of some before it, of round numbers.
    `left`: the rank has left the job in order and sends no more heartbeats.
    """

    count: int
    waits_in: str | None
    groups: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    left: bool = False

    def has_joined(self, collective: PendingCollective) -> bool:
        """Whether the rank has called a collective of its group, the very same one."""
        number, digest = self.groups.get(collective.group, [(0, 0)])[0]
        return number > collective.number or (number, digest) == (collective.number, collective.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastHeartbeat:
    """A rank's newest heartbeat, and when it arrived (this process's monotonic seconds)."""

    heartbeat: StoreHeartbeat
    at: float


def place_of_this_process(*, native: bool) -> ProcessPlace:
    """Where this process runs."""
    with suppress(OSError):  # without it, no other process takes this kernel for its own
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = (PROC / "self/ns/pid").readlink().name
        started = read_stat(os.getpid()).started
        kernel = f"{boot} {namespace}"
        return ProcessPlace(host=socket.gethostname(), kernel=kernel, pid=os.getpid(), started=started, native=native)
    return ProcessPlace(host=socket.gethostname(), kernel="", pid=os.getpid(), started=0, native=native)


def is_scheduled(pid: int, started: int) -> bool:
    """Whether a process of this host lives and may run: it is neither stopped nor dead."""
    try:
        stat = read_stat(pid)
    except OSError:
        return False
    return stat.started == started and stat.state not in NOT_SCHEDULED


def silence_limit(heartbeat: ProcessPlace, kernel: str, timeout_s: float) -> float:
    """The seconds of silence after which a rank is lost, seen from a process in `kernel`.

    A rank of this host that lives and is scheduled has all of the group's timeout: its heartbeats are only late. So has
    one of another host whose heartbeats need Python, which a long call may keep.
    """
    if kernel and heartbeat.kernel == kernel:
        lives, short_s = is_scheduled(heartbeat.pid, heartbeat.started), STOPPED_TIMEOUT_S
    else:
        lives, short_s = not heartbeat.native, HEARTBEAT_TIMEOUT_S
    return max(timeout_s, HEARTBEAT_TIMEOUT_S) if lives else short_s


def silent_rank(last: Mapping[int, LastHeartbeat], now: float, limit: Callable[[StoreHeartbeat], float]) -> str | None:
    """A line about the rank that has been silent longest, if that is longer than its limit in seconds; else None."""
    silent = [(seen.at, rank) for rank, seen in last.items() if not seen.heartbeat.left]
    for at, rank in sorted(silent):
        heartbeat, silent_for = last[rank].heartbeat, now - at
        if silent_for <= STOPPED_TIMEOUT_S:
            break
        if silent_for > limit(heartbeat):
            was = _where(heartbeat)
            return f"rank {rank} on {heartbeat.host} has sent no heartbeat for {silent_for:.0f} s: it was last {was}"
    return None


def absent_ranks(last: Mapping[int, LastHeartbeat], collective: PendingCollective, members: Iterable[int]) -> str:
    """A line about the members of a collective's group that have not joined it."""
    absent = [rank for rank in members if rank not in last or not last[rank].heartbeat.has_joined(collective)]
    if not absent:
        return "all of its ranks have joined"
    return f"not joined by {first_named([_described(rank, last) for rank in absent])}"


def departed_rank(
    last: Mapping[int, LastHeartbeat], collective: PendingCollective, members: Iterable[int]
) -> str | None:
    """A line about a member that has left the job without a collective that this rank waits in; None without one."""
    if not collective.group:
        return None
    for rank in members:
        if rank in last and last[rank].heartbeat.left and not last[rank].heartbeat.has_joined(collective):
            return f"{_described(rank, last)} never calls it"
    return None


def differing_ranks(last: Mapping[int, LastHeartbeat]) -> str | None:
    """A line about two ranks whose collectives of a group differ up to the same number; None where none are seen."""
    groups = {group for seen in last.values() for group in seen.heartbeat.groups}
    for group in sorted(groups):
        called = {rank: seen.heartbeat.groups.get(group, ()) for rank, seen in last.items()}
        places = sorted({(*place, rank) for rank, places in called.items() for place in places})
        for (number, digest, rank), (other_number, other_digest, other) in pairwise(places):
            if number == other_number and digest != other_digest:
                described = f"{_described(rank, last)}, {_described(other, last)}"
                return (
                    f"the ranks of group {group} differ at its collective #{number} or before: {described}: all ranks "
                    "must call the same collectives in the same order, with the same sizes, types and options"
                )
    return None


def places_of(last: Mapping[int, LastHeartbeat]) -> str:
    """Which rank is in what."""
    return first_named([_described(rank, last) for rank in sorted(last)])


def watched_ranks(ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """The ranks that a rank watches: itself, the first one, and MOST_WATCHED at most, from all hosts.

    All of them watch one another, so that any one of them that lives is enough.
    """
    position = ranks.index(rank)
    stride = math.ceil(len(ranks) / MOST_WATCHED)
    return tuple(sorted({ranks[0], *ranks[position % stride :: stride]}))


def _described(rank: int, last: Mapping[int, LastHeartbeat]) -> str:
    if rank not in last:
        return f"rank {rank} (no heartbeat yet)"
    return f"rank {rank} on {last[rank].heartbeat.host} ({_where(last[rank].heartbeat)})"


def _where(heartbeat: StoreHeartbeat) -> str:
    if heartbeat.left:
        return "has left"
    return f"in {heartbeat.waits_in}" if heartbeat.waits_in else "in no collective"


def key_of(rank: int) -> str:
    """The store's key for a rank's heartbeats."""
    return f"heartbeat/{rank}"


def newest(
    keys: SignedKeys, ranks: Iterable[int], last: Mapping[int, LastHeartbeat], now: float
) -> dict[int, LastHeartbeat]:
    """The last heartbeats, those newer than `last` as of `now`. Raises RuntimeError where the store is gone."""
    started = [rank for rank in ranks if rank in last or keys.has(key_of(rank))]
    found = dict(last)
    for rank, text in zip(started, keys.get_all([key_of(rank) for rank in started]), strict=True):
        heartbeat = StoreHeartbeat(**json.loads(text)) if text is not None else None
        # One that is set again, by whom it may be, is no sign of life.
        if heartbeat and (rank not in last or heartbeat.count > last[rank].heartbeat.count):
            found[rank] = LastHeartbeat(heartbeat=heartbeat, at=now)
    return found


class HeartbeatThread:
    """Sends a rank's heartbeats from a Python thread, until it stops; for backends without a native one."""

    def __init__(
        self, keys: SignedKeys, rank: int, place: ProcessPlace, pending: Callable[[], PendingCollective]
    ) -> None:
        self._keys, self._rank, self._place, self._pending = keys, rank, place, pending
        self._count = 0
        self._stopped = threading.Event()
        self._send()
        self._thread = threading.Thread(target=self._run, name="cputrain-beat", daemon=True)
        self._thread.start()

    def stop(self, patience_s: float) -> None:
        """Stop, and tell the other ranks that this one has left; the store may not answer in `patience_s`."""
        self._stopped.set()
        self._thread.join(patience_s)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store has gone with rank 0, which the watchdog's own connection tells too
            while not self._stopped.wait(HEARTBEAT_S):
                self._send()
            self._send(left=True)

    def _send(self, *, left: bool = False) -> None:
        self._count += 1
        heartbeat = StoreHeartbeat(
            **asdict(self._place), count=self._count, waits_in=self._pending().name or None, left=left
        )
        self._keys.set(key_of(self._rank), json.dumps(asdict(heartbeat)))
