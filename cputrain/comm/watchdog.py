"""The watchdog that ends a rank when a peer dies or hangs, so that no rank waits forever.

Each rank sends heartbeats to the job's store (heartbeats.py), reads those of some others, and publishes which of them
is silent, or in a collective that differs. No rank judges alone: one whose Python is kept by a long call cannot. A rank
that waits in a collective is then ended; a rank that computes, or has left the job, depends on no peer and goes on. The
watchdog runs in threads of its own, with its own connection to the store. Where its process was suspended, the silence
of the others counts anew.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cputrain.comm.heartbeats import (
    LastHeartbeat,
    PendingCollective,
    StoreHeartbeat,
    absent_ranks,
    departed_rank,
    differing_ranks,
    newest,
    place_of_this_process,
    places_of,
    silence_limit,
    silent_rank,
    watched_ranks,
)
from cputrain.comm.store import SERVERS, SignedKeys, describe_gone
from mpi.supervise.connection import HEARTBEAT_S, HEARTBEAT_TIMEOUT_S

ABSENT_S = 3 * HEARTBEAT_S  # before the timeout of a collective
EXIT_S = 3.0  # from failing a rank's collectives, an error that its code may still report, to ending it
JOIN_S = 1.0
OVERDUE_S = 10.0  # for a backend to end a collective after its timeout, before the rank is ended
# For the destruction of a group once the store has ended: rank 0 may have left the job, and oneCCL's destruction wait
# until its process ends MPI.
LEAVING_S = 30.0
SUSPENDED_S = 2 * HEARTBEAT_S  # a thread that was away for longer did not run: suspension, or a call that kept Python

log = logging.getLogger(__name__)


class Sender(Protocol):
    """What sends this rank's heartbeats."""

    def stop(self, patience_s: float, /) -> None:
        """Stop, and tell the others that this rank has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedBackend:
    """What a watchdog asks and tells the backend of this rank; gloo and MPI have `pending` only.

    `pending` returns the collective that this rank waits in, `members` the ranks of a group, `failure` the backend's
    own error, `disagreement` what it has found to differ between ranks ("": nothing). `set_absent_ranks` receives a
    collective and the line about the ranks that have not joined it, for the message of its timeout; `abort` and
    `disagree` fail this rank's collectives with a message.
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

    `ranks` are the group's, as people number them, `rank` this one of them. `sender` sends its heartbeats.
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
        self._published_lost = self._claimed = ""
        self._failed: float | None = None
        self._store_answered = time.monotonic()
        atexit.register(self.stop)  # a thread that is inside the store would not survive the interpreter's end
        # Two, as the first may hang in the store when rank 0 is stopped or cut off.
        self._threads = tuple(
            threading.Thread(target=target, name="cputrain-watchdog", daemon=True)
            for target in (self._read_heartbeats, self._end_when_peer_lost)
        )
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching; the other ranks expect no more heartbeats from this one."""
        if self._stopped.is_set() or os.getpid() != self._process:  # a forked child has none of these threads
            return
        self._stopped.set()
        for thread in self._threads:
            thread.join(JOIN_S)
        self._sender.stop(JOIN_S)
        atexit.unregister(self.stop)

    def watches(self) -> bool:
        """Whether it was not stopped and its store answers: that of a destroyed world may have ended with it."""
        try:
            self._keys.has("lost")
        except RuntimeError:
            return False
        return not self._stopped.is_set()

    def _read_heartbeats(self) -> None:
        while True:
            before = time.monotonic()
            if self._stopped.wait(HEARTBEAT_S):
                return
            if time.monotonic() - before > SUSPENDED_S:
                self._count_anew()
            before = time.monotonic()
            problem = self._check_peers()
            now = time.monotonic()
            if now - before > SUSPENDED_S:
                self._count_anew()
            else:
                self._problem = problem
            self._store_answered = now

    def _count_anew(self) -> None:
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
                self._end(f"its timeout was {overdue_s:.0f} s ago, and the backend does not return", name)
            elif problem and name and not leaves:
                self._end(problem, name)

    def _limit(self, heartbeat: StoreHeartbeat) -> float:
        return silence_limit(heartbeat, self._kernel, self._timeout_s)

    def _store_limit(self) -> float:
        serving = self._last.get(0)
        return self._limit(serving.heartbeat) if serving else HEARTBEAT_TIMEOUT_S

    def _check_peers(self) -> str | None:
        """Read the heartbeats of the ranks that this one watches; a line about what is wrong, None if nothing is."""
        try:
            now = time.monotonic()
            self._last = newest(self._keys, self._watched, self._last, now)
            pending = self._backend.pending()
            self._describe_absent(pending)
            differ = self._backend.disagreement() or differing_ranks(self._last)
            if differ:
                threading.Thread(target=self._backend.disagree, args=(differ,), daemon=True).start()
            watched_members = set(self._backend.members(pending.group)) & set(self._watched)
            lost = self._publish(
                differ
                or silent_rank(self._last, now, self._limit)
                or departed_rank(self._last, pending, sorted(watched_members))
            )
            return lost or self._explained_failure(now)
        except RuntimeError as error:  # c10d's only error: the connection is closed, or the store does not answer
            self._store_gone = self._store_gone or time.monotonic()
            return describe_gone(error)

    def _publish(self, own: str | None) -> str | None:
        """What any rank has found to be wrong, this one's finding at first; one that is no longer so is withdrawn."""
        known = self._keys.get("lost") or ""
        wanted = own or ("" if known == self._published_lost else known)
        if wanted != known and (own is None or not known):  # a FileStore keeps whatever is ever set
            self._published_lost = wanted
            self._keys.set("lost", wanted)
        return own or wanted or None

    def _describe_absent(self, pending: PendingCollective) -> None:
        """Say who has not joined the collective that this rank waits in, shortly before its timeout.

        One of its ranks reads the heartbeats of all, for all of them.
        """
        if not pending.group or pending.overdue_s < -ABSENT_S:
            return
        key = f"absent/{pending.group}/{pending.number}"
        if self._claimed == key or self._keys.claim(f"{key}/claim"):
            self._claimed = key
            members = self._backend.members(pending.group)
            seen = newest(self._keys, members, {}, time.monotonic())
            self._keys.set(key, absent_ranks(seen, pending, members))
        self._backend.set_absent_ranks(pending.name, self._keys.get(key) or "")

    def _explained_failure(self, now: float) -> str | None:
        """The backend's own error with the places of the ranks, once all have been heard of since; None until then."""
        failure = self._backend.failure()
        if not failure:
            return None
        self._failed = self._failed or now
        living = [seen for seen in self._last.values() if not seen.heartbeat.left]
        if any(seen.at <= self._failed for seen in living) and now - self._failed < HEARTBEAT_TIMEOUT_S + HEARTBEAT_S:
            return None
        return f"{failure}; {places_of(self._last)}"

    def _end(self, problem: str, collective: str) -> None:
        """Fail this rank's collectives, then end the rank, even where the backend never returns from failing them."""
        message = f"{problem}; rank {self._rank} waits in {collective}"
        threading.Thread(target=self._backend.abort, args=(message,), daemon=True).start()
        time.sleep(EXIT_S)
        if not self._stopped.is_set():
            log.error("cputrain: rank %d waits in %s: %s", self._rank, collective, problem)
            _flush_output()
            os._exit(1)


def _flush_output() -> None:
    """Write what the program has printed, as os._exit does not; where nobody reads it, the process still ends."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:  # a program may have closed it, or have none
                stream.flush()

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(JOIN_S)
