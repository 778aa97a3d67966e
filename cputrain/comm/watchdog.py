"""Rank heartbeats through the job's c10d store, and detection of silent ranks and of mismatched collectives.

Each rank sends heartbeats to the store, reads the heartbeats of some other ranks, and publishes which rank is silent or
in a different collective. Several ranks watch each rank, because a watchdog cannot run while a long call holds the GIL.
When a peer is lost, ranks that wait in a collective are ended; ranks that compute, or have left the job, continue.
The watchdog has its own threads and its own connection to the store. If its process was suspended, it restarts the
timeouts of all other ranks.
"""

import atexit
import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

from cputrain.affinity.filesystem import PROC, read_stat
from cputrain.affinity.wording import first_named
from cputrain.comm.store import SERVERS, SignedKeys, describe_gone
from cputrain.mpi.supervise.wire import HEARTBEAT_S, HEARTBEAT_TIMEOUT_S

STOPPED, DEAD = "T", frozenset("ZXx")  # in /proc/PID/stat, proc(5); "t" is in a debugger
MAX_WATCHED_RANKS = 16
SAME = "with the same sizes, types and options"
STOPPED_TIMEOUT_S = 6.0  # timeout for a rank on this host if the kernel reports it as stopped or dead
STOPPED_LOOK_S = 1.0  # for which a stopped process is looked at: cpulimit(1) stops and continues one all the time

ABSENT_S = 3 * HEARTBEAT_S  # before a collective's timeout, when absent ranks are first looked up
EXIT_S = 3.0  # between failing a rank's collectives and ending the process, for its code to report the error
JOIN_S = 1.0
OVERDUE_S = 10.0  # after a collective's timeout, for the backend to return before the rank is ended
# Limit for the destruction of a group once the store has ended: rank 0 may have left the job, and oneCCL's destruction
# may wait until rank 0's process has finalized MPI.
LEAVING_S = 30.0
SUSPENDED_S = 2 * HEARTBEAT_S  # after a longer gap, the process was suspended, or a call held the GIL

log = logging.getLogger(__name__)


class PendingCollective(NamedTuple):
    """The collective or message in which a rank waits ("" if none), and the seconds since its timeout.

    `group` is the key of a collective's group ("" if unknown; see name_of_group), `number` counts the group's
    collectives, and `digest` is a hash of all of them up to this number. `peers` are the possible sources or
    destinations of a message. `waited_s` is how long the main thread has waited, not counting the time in which it
    computed, or continued with other collectives, while this one was in flight.
    """

    name: str
    overdue_s: float = 0.0
    group: str = ""
    number: int = 0
    digest: int = 0
    peers: Sequence[int] = ()
    waited_s: float = 0.0

    @property
    def is_destruction(self) -> bool:
        """Whether the group is being destroyed, as when a rank leaves the job."""
        return self.name.startswith("the destruction of ")  # name given in native/backend.cpp


def name_of_group(key: str) -> str:
    """Return PyTorch's name of a group, without the "@" suffix that distinguishes successive groups of that name."""
    return key.rpartition("@")[0] or key


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlace:
    """Where a rank runs: its host, the kernel and PID namespace, and its PID and start time there.

    `native`: a native thread sends its heartbeats, which does not need the GIL, so they only stop with the process.
    """

    host: str
    kernel: str
    pid: int
    started: int
    native: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHeartbeat(ProcessPlace):
    """A rank's heartbeat; `waits_in` is the collective in flight, `group` and `number` are its group's key and its
    number there, and `waited_s` is as in PendingCollective.

    `groups` maps each group's key to (number, digest, balance) of the last collective the rank has called in it,
    followed by those of some earlier collectives with round numbers. Number and digest are as in PendingCollective.
    Balances of all ranks sum to 0 modulo 2**64 if each rank has sent, up to this collective, what the others expected.
    `left`: the rank has left the job normally and sends no more heartbeats.
    """

    count: int
    waits_in: str | None
    group: str = ""
    number: int = 0
    waited_s: float = 0.0
    groups: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    left: bool = False

    def has_joined(self, collective: PendingCollective) -> bool:
        """Return whether the rank has called this collective."""
        number, digest = self.groups.get(collective.group, [(0, 0)])[0][:2]
        same = (number, digest) == (collective.number, collective.digest) or self.waits_in == collective.name
        return number > collective.number or same


@dataclass(frozen=True, slots=True, kw_only=True)
class LastHeartbeat:
    """A rank's newest heartbeat, and its arrival by this process's monotonic clock, in seconds."""

    heartbeat: StoreHeartbeat
    at: float


def place_of_this_process(*, native: bool) -> ProcessPlace:
    """Return where this process runs."""
    with suppress(OSError):  # an empty kernel never matches another process's
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = (PROC / "self/ns/pid").readlink().name
        started = read_stat(os.getpid()).started
        kernel = f"{boot} {namespace}"
        return ProcessPlace(host=socket.gethostname(), kernel=kernel, pid=os.getpid(), started=started, native=native)
    return ProcessPlace(host=socket.gethostname(), kernel="", pid=os.getpid(), started=0, native=native)


def is_scheduled(pid: int, started: int) -> bool:
    """Return whether a process on this host is neither stopped nor dead. One that is stopped is looked at for
    STOPPED_LOOK_S: it may run by turns."""
    try:
        stat = read_stat(pid)
        if stat.state != STOPPED or stat.started != started:
            return stat.started == started and stat.state not in DEAD
        time.sleep(STOPPED_LOOK_S)
        return read_stat(pid).cpu_s > stat.cpu_s
    except OSError:
        return False


def silence_limit(heartbeat: ProcessPlace, kernel: str, timeout_s: float) -> float:
    """Return the seconds of silence after which a process in `kernel` considers a rank as lost.

    The limit is the group's timeout for a running rank on this host, whose heartbeats are only late, and for a rank on
    another host whose heartbeats need the GIL, which a long call may hold.
    """
    if kernel and heartbeat.kernel == kernel:
        lives, short_s = is_scheduled(heartbeat.pid, heartbeat.started), STOPPED_TIMEOUT_S
    else:
        lives, short_s = not heartbeat.native, HEARTBEAT_TIMEOUT_S
    return max(timeout_s, HEARTBEAT_TIMEOUT_S) if lives else short_s


def silent_rank(last: Mapping[int, LastHeartbeat], now: float, limit: Callable[[StoreHeartbeat], float]) -> str | None:
    """Return a line about the longest silent rank if it has exceeded its limit in seconds, else None."""
    silent = [(seen.at, rank) for rank, seen in last.items() if not seen.heartbeat.left]
    for at, rank in sorted(silent):
        heartbeat, silent_for = last[rank].heartbeat, now - at
        if silent_for <= STOPPED_TIMEOUT_S:
            break
        if silent_for > limit(heartbeat):
            was = _where(heartbeat)
            return f"rank {rank} on {heartbeat.host} has sent no heartbeat for {silent_for:.0f} s, last seen {was}"
    return None


def ranks_not_joined(
    last: Mapping[int, LastHeartbeat], collective: PendingCollective, members: Iterable[int]
) -> list[tuple[int, str]]:
    """Return the members of a collective's group that have not joined it, each with a description."""
    absent = (rank for rank in members if rank not in last or not last[rank].heartbeat.has_joined(collective))
    return [(rank, _described(rank, last)) for rank in absent]


def describe_absent(absent: Iterable[tuple[int, str]], watcher: int) -> str:
    """Return a line about ranks that have not joined a collective that the rank `watcher` has joined."""
    peers = [described for rank, described in absent if rank != watcher]
    return f"not joined by {first_named(peers)}" if peers else "all of its ranks have joined"


def describe_peers(last: Mapping[int, LastHeartbeat], peers: Iterable[int]) -> str:
    """Return a line about the possible sources or destinations of a message."""
    return f"it waits for {first_named([_described(rank, last) for rank in peers])}"


def departed_rank(
    last: Mapping[int, LastHeartbeat], collective: PendingCollective, members: Iterable[int]
) -> str | None:
    """Return a line about a member that has left the job without joining the collective, or about a message's peers if
    all of them have left; else None."""
    peers = [rank for rank in collective.peers if rank in last and last[rank].heartbeat.left]
    if peers and len(peers) == len(collective.peers):
        return f"nobody is left to answer: {first_named([_described(rank, last) for rank in peers])}"
    if not collective.group:
        return None
    for rank in members:
        if rank in last and last[rank].heartbeat.left and not last[rank].heartbeat.has_joined(collective):
            return f"{_described(rank, last)} never calls it"
    return None


def differing_ranks(last: Mapping[int, LastHeartbeat], members: Callable[[str], Sequence[int]]) -> str | None:
    """Return a line about ranks whose collectives in a group differ up to the same number, None if there are none.

    `members` returns the ranks of a group, an empty sequence if it is unknown.
    """
    groups = {group for seen in last.values() for group in seen.heartbeat.groups}
    for group in sorted(groups):
        called = {rank: seen.heartbeat.groups.get(group, ()) for rank, seen in last.items()}
        calls = sorted((number, digest, rank) for rank, calls in called.items() for number, digest, _ in calls)
        for (number, digest, rank), (other_number, other_digest, other_rank) in pairwise(calls):
            if number == other_number and digest != other_digest:
                described = f"{_described(rank, last)}, {_described(other_rank, last)}"
                return _differ(
                    group, number, f"{described}: all ranks must call the same collectives in the same order"
                )
        unbalanced = _unbalanced(called, members(group))
        if unbalanced:
            ranks = first_named([_described(rank, last) for rank in members(group)])
            return _differ(group, unbalanced, f"{ranks}: each rank must send in an all_to_all what the other expects")
    return None


def _differ(group: str, number: int, what: str) -> str:
    name = name_of_group(group)
    return f"the ranks of group {name} differ at its collective #{number} or before: {what}, {SAME}"


def _unbalanced(called: Mapping[int, Sequence[Sequence[int]]], members: Sequence[int]) -> int | None:
    """Return the first collective, called by all members, at which their balances do not sum to 0; else None."""
    of_members = [{number: balance for number, _, balance in called.get(rank, ())} for rank in members]
    common = set.intersection(*map(set, of_members)) if of_members else set()
    return min((number for number in common if sum(counts[number] for counts in of_members) % 2**64), default=None)


def describe_collectives(last: Mapping[int, LastHeartbeat]) -> str:
    """Return a line that says in which collective each rank is."""
    return first_named([_described(rank, last) for rank in sorted(last)])


def watched_ranks(ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the ranks that a rank watches: the first rank, and up to MAX_WATCHED_RANKS of all hosts, itself included.

    These ranks watch each other, so that one running rank is enough.
    """
    position = ranks.index(rank)
    stride = math.ceil(len(ranks) / MAX_WATCHED_RANKS)
    return tuple(sorted({ranks[0], *ranks[position % stride :: stride]}))


def _described(rank: int, last: Mapping[int, LastHeartbeat]) -> str:
    if rank not in last:
        return f"rank {rank} (no heartbeat yet)"
    return f"rank {rank} on {last[rank].heartbeat.host} ({_where(last[rank].heartbeat)})"


def _where(heartbeat: StoreHeartbeat) -> str:
    if heartbeat.left:
        return "has left"
    return f"in {heartbeat.waits_in}" if heartbeat.waits_in else "in no collective"


def heartbeat_key(rank: int) -> str:
    """Return the store's key for a rank's heartbeats."""
    return f"heartbeat/{rank}"


def newest(
    keys: SignedKeys, ranks: Iterable[int], last: Mapping[int, LastHeartbeat], now: float
) -> tuple[dict[int, LastHeartbeat], list[int]]:
    """Return `last` updated with heartbeats that arrived by `now`, and the ranks whose heartbeats cannot be parsed.

    Raises RuntimeError if the store is gone.
    """
    started = [rank for rank in ranks if rank in last or keys.has(heartbeat_key(rank))]
    entries = dict(last)
    unreadable = []
    for rank, text in zip(started, keys.get_all([heartbeat_key(rank) for rank in started]), strict=True):
        try:
            heartbeat = _parsed(text) if text is not None else None
        except (AttributeError, TypeError, ValueError):
            heartbeat = None
            unreadable.append(rank)
        # An old heartbeat that was set again, by any process, is no sign of life.
        if heartbeat and (rank not in last or heartbeat.count > last[rank].heartbeat.count):
            entries[rank] = LastHeartbeat(heartbeat=heartbeat, at=now)
    return entries, unreadable


def _parsed(text: str) -> StoreHeartbeat:
    """Parse a heartbeat. Raises AttributeError, TypeError or ValueError if it is not from this version."""
    heartbeat = StoreHeartbeat(**json.loads(text))
    groups = {
        key: [(number, digest, balance) for number, digest, balance in calls] for key, calls in heartbeat.groups.items()
    }
    return replace(heartbeat, groups=groups)


class HeartbeatThread:
    """Sends a rank's heartbeats from a Python thread until stopped; for backends without a native thread. They are also
    written to the open file `copy`, for the launcher."""

    def __init__(
        self,
        keys: SignedKeys,
        rank: int,
        process_place: ProcessPlace,
        pending: Callable[[], PendingCollective],
        groups: Callable[[], Mapping[str, Sequence[Sequence[int]]]] = dict,
        copy: int | None = None,
    ) -> None:
        self._keys, self._rank, self._place, self._pending, self._groups = keys, rank, process_place, pending, groups
        self._copy = copy
        self._count = 0
        self._stopped = threading.Event()
        self._send()
        self._thread = threading.Thread(target=self._run, name="cputrain-beat", daemon=True)
        self._thread.start()

    def stop(self, patience_s: float) -> None:
        """Stop, and report that this rank has left; wait at most `patience_s` for the store."""
        self._stopped.set()
        self._thread.join(patience_s)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone, which the watchdog also detects by its own connection
            while not self._stopped.wait(HEARTBEAT_S):
                self._send()
            self._send(left=True)

    def _send(self, *, left: bool = False) -> None:
        self._count += 1
        pending = self._pending()
        heartbeat = StoreHeartbeat(
            **asdict(self._place),
            count=self._count,
            waits_in=pending.name or None,
            group=pending.group,
            number=pending.number,
            waited_s=pending.waited_s,
            groups=self._groups(),
            left=left,
        )
        text = json.dumps(asdict(heartbeat))
        if self._copy is not None:
            os.pwrite(self._copy, f"{text}\n".encode(), 0)
        self._keys.set(heartbeat_key(self._rank), text)


class Sender(Protocol):
    """Sender of this rank's heartbeats."""

    def stop(self, patience_s: float, /) -> None:
        """Stop, and report that this rank has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedBackend:
    """A watchdog's interface to this rank's backend; gloo and MPI only have `pending`.

    `pending` returns the collective in which this rank waits, `members` the ranks of a group by its key, `failure` the
    backend's own error, `disagreement` a mismatch between ranks that the backend has detected ("" if none).
    `set_absent_ranks` passes the line about ranks that have not joined a collective, for its timeout's message; `abort`
    and `disagree` fail this rank's collectives with a message.
    """

    pending: Callable[[], PendingCollective]
    members: Callable[[str], Sequence[int]] = lambda _: ()
    set_absent_ranks: Callable[[str, str], None] = lambda _name, _text: None
    abort: Callable[[str], None] = lambda _: None
    failure: Callable[[], str] = lambda: ""
    disagreement: Callable[[], str] = lambda: ""
    disagree: Callable[[str], None] = lambda _: None


class Watchdog:
    """Watches the ranks of a process group until `stop`, and ends this rank when a peer is lost.

    `ranks` are the group's ranks, by their numbers in the job, and `rank` is this one. `sender` sends its heartbeats.
    """

    def __init__(
        self,
        keys: SignedKeys,
        *,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        sender: Sender,
        backend: WatchedBackend,
    ) -> None:
        self._keys = keys
        self.ranks = tuple(ranks)
        self._rank, self._timeout_s, self._sender = rank, timeout_s, sender
        self._backend = backend
        self._watched = watched_ranks(self.ranks, rank)
        self._kernel = place_of_this_process(native=False).kernel
        self._process = os.getpid()
        self._last: dict[int, LastHeartbeat] = {}
        self._stopped = threading.Event()
        self._problem: str | None = None
        self._store_gone: float | None = None
        self._published_lost = self._claimed = self._waited_in = ""
        self._failed: float | None = None
        self._warned = False
        self._store_answered = time.monotonic()
        atexit.register(self.stop)  # a thread in a call of the store would crash when the interpreter exits
        # Two threads, as the first may hang in the store if rank 0 is stopped or disconnected.
        self._threads = tuple(
            threading.Thread(target=target, name="cputrain-watchdog", daemon=True)
            for target in (self._read_heartbeats, self._end_when_peer_lost)
        )
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching, and report to the other ranks that this one sends no more heartbeats."""
        if self._stopped.is_set() or os.getpid() != self._process:  # a forked child does not have these threads
            return
        self._stopped.set()
        for thread in self._threads:
            thread.join(JOIN_S)
        self._sender.stop(JOIN_S)
        atexit.unregister(self.stop)

    def watches(self) -> bool:
        """Return whether the watchdog is running and its store answers, which may have ended with a destroyed world."""
        try:
            self._keys.has("lost")
        except RuntimeError:
            return False
        return not self._stopped.is_set()

    def _read_heartbeats(self) -> None:
        while True:
            before = time.monotonic()
            if self._stopped.wait(HEARTBEAT_S / 4 if self._is_timeout_near(self._backend.pending()) else HEARTBEAT_S):
                return
            if time.monotonic() - before > SUSPENDED_S:
                self._restart_timeouts()
            before = time.monotonic()
            problem = self._check_peers()
            now = time.monotonic()
            if now - before > SUSPENDED_S:
                self._restart_timeouts()
            else:
                self._problem = problem
            self._store_answered = now

    def _restart_timeouts(self) -> None:
        now = time.monotonic()
        self._last = {rank: replace(seen, at=now) for rank, seen in self._last.items()}
        self._problem = None

    def _end_when_peer_lost(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(HEARTBEAT_S / 2):
            now = time.monotonic()
            if now - before > SUSPENDED_S:
                self._store_answered = now
            before = now
            silent_for = now - self._store_answered
            frozen = f"the process that serves the job's store ({SERVERS}) has not answered for {silent_for:.0f} s"
            problem = frozen if silent_for > self._store_limit() else self._problem
            pending = self._backend.pending()
            name, overdue_s = pending.name, pending.overdue_s
            leaves = self._store_gone is not None and pending.is_destruction and now - self._store_gone < LEAVING_S
            if overdue_s > OVERDUE_S:
                self._end(f"it timed out {overdue_s:.0f} s ago, and the backend does not return", name)
            elif problem and name and not leaves:
                self._end(problem, name)

    def _limit(self, heartbeat: StoreHeartbeat) -> float:
        return silence_limit(heartbeat, self._kernel, self._timeout_s)

    def _store_limit(self) -> float:
        serving = self._last.get(0)
        return self._limit(serving.heartbeat) if serving else HEARTBEAT_TIMEOUT_S

    def _check_peers(self) -> str | None:
        """Read the heartbeats of the watched ranks; return a line about a problem, None if there is none."""
        try:
            now = time.monotonic()
            self._last, unreadable = newest(self._keys, self._watched, self._last, now)
            self._warn_of(unreadable)
            pending = self._backend.pending()
            self._describe_absent(pending)
            # A message that was sent before its sender left may still be in flight.
            settled, self._waited_in = pending.name == self._waited_in, pending.name
            differ = self._backend.disagreement() or differing_ranks(self._last, self._backend.members)
            if differ:
                threading.Thread(target=self._backend.disagree, args=(differ,), daemon=True).start()
            watched_members = set(self._backend.members(pending.group)) & set(self._watched)
            lost = self._publish(
                differ
                or silent_rank(self._last, now, self._limit)
                or (departed_rank(self._last, pending, sorted(watched_members)) if settled or pending.group else None)
            )
            return lost or self._explained_failure(now)
        except RuntimeError as error:  # c10d's only error: the connection is closed, or the store does not answer
            self._store_gone = self._store_gone or time.monotonic()
            return describe_gone(error)

    def _warn_of(self, unreadable: Sequence[int]) -> None:
        if unreadable and not self._warned:
            self._warned = True
            ranks = first_named([f"rank {rank}" for rank in unreadable])
            log.warning(
                "cputrain: cannot parse the heartbeats of %s, so these ranks are not watched: install the same version "
                "of cputrain on all hosts",
                ranks,
            )

    def _publish(self, problem: str | None) -> str | None:
        """Publish this rank's finding, or withdraw an outdated one; return it, or else another rank's finding."""
        lost = self._keys.get("lost") or ""
        current = problem or ("" if lost == self._published_lost else lost)
        if current != lost and (problem is None or not lost):  # set rarely, as a FileStore grows with every call
            self._published_lost = current
            self._keys.set("lost", current)
        return problem or current or None

    @staticmethod
    def _is_timeout_near(pending: PendingCollective) -> bool:
        """Return whether the timeout is near, for a message or for a collective in a known group."""
        return bool(pending.group or pending.peers) and pending.overdue_s > -ABSENT_S

    def _describe_absent(self, pending: PendingCollective) -> None:
        """Pass to the backend, repeatedly until the timeout, the peers of the message or the ranks that have not joined
        the collective in which this rank waits.

        Only one rank of a collective reads the heartbeats of all members, on behalf of all. In a world that cputrain
        did not create, groups with ranks outside `self.ranks` have their own watchdog.
        """
        members = pending.peers or self._backend.members(pending.group)
        if not self._is_timeout_near(pending) or not set(members) <= set(self.ranks):
            return
        if pending.peers:
            seen, _ = newest(self._keys, members, {}, time.monotonic())
            self._backend.set_absent_ranks(pending.name, describe_peers(seen, members))
            return
        key = f"absent/{pending.group}/{pending.number}"
        if self._claimed == key or self._keys.claim(f"{key}/claim"):
            self._claimed = key
            seen, _ = newest(self._keys, members, {}, time.monotonic())
            self._keys.set(key, json.dumps(ranks_not_joined(seen, pending, members)))
        entry = self._keys.get(key)
        if entry is not None:
            self._backend.set_absent_ranks(pending.name, describe_absent(json.loads(entry), self._rank))

    def _explained_failure(self, now: float) -> str | None:
        """Return the backend's error with each rank's collective once all ranks have reported since, else None."""
        failure = self._backend.failure()
        if not failure:
            return None
        self._failed = self._failed or now
        living = [seen for seen in self._last.values() if not seen.heartbeat.left]
        if any(seen.at <= self._failed for seen in living) and now - self._failed < HEARTBEAT_TIMEOUT_S + HEARTBEAT_S:
            return None
        return f"{failure}; {describe_collectives(self._last)}"

    def _end(self, problem: str, collective: str) -> None:
        """Fail this rank's collectives, then end the process, even if the backend never returns from `abort`."""
        message = f"{problem}; rank {self._rank} waits in {collective}"
        threading.Thread(target=self._backend.abort, args=(message,), daemon=True).start()
        time.sleep(EXIT_S)
        if not self._stopped.is_set():
            log.error("cputrain: rank %d waits in %s: %s", self._rank, collective, problem)
            _flush_output()
            os._exit(1)


def _flush_output() -> None:
    """Flush the output, which os._exit does not do, in a thread, so that the process ends even if nobody reads it."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:  # closed by the program, or None
                stream.flush()

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(JOIN_S)
