"""The watchdog that ends a rank when a peer dies or hangs, so that no rank waits forever.

Each rank sends heartbeats to the job's store (heartbeats.py); the group's first rank checks them and publishes which
rank is silent. A rank that waits in a collective is then ended; a rank that computes, or has left the job, depends on
no peer and goes on. The watchdog runs in threads of its own, with its own connection to the store. Where its process
was suspended, the silence of the others counts anew.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from cputrain.comm.heartbeats import (
    LastHeartbeat,
    PendingCollective,
    StoreHeartbeat,
    absent_ranks,
    newest,
    place_of_this_process,
    silence_limit,
    silent_rank,
)
from cputrain.comm.store import SERVERS, SignedKeys, describe_gone
from mpi.supervise.connection import HEARTBEAT_S, HEARTBEAT_TIMEOUT_S

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


class Watchdog:
    """Watches the ranks of a process group until `stop`, and ends this rank when a peer is lost.

    `ranks` are the group's, as people number them, `rank` this one of them. `sender` sends its heartbeats. `pending`
    returns the collective that this rank waits in; `set_absent_ranks` receives the line about absent ranks, for the
    message of a timeout; `abort` fails this rank's collectives with a message.
    """

    def __init__(
        self,
        keys: SignedKeys,
        *,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        sender: Sender,
        pending: Callable[[], PendingCollective],
        set_absent_ranks: Callable[[str], None],
        abort: Callable[[str], None],
    ) -> None:
        self._keys = keys
        self.ranks = tuple(ranks)
        self._rank, self._timeout_s, self._sender = rank, timeout_s, sender
        self._pending, self._set_absent_ranks, self._abort = pending, set_absent_ranks, abort
        self._kernel = place_of_this_process(native=False).kernel
        self._process = os.getpid()
        self._last: dict[int, LastHeartbeat] = {}
        self._stopped = threading.Event()
        self._problem: str | None = None
        self._store_gone: float | None = None
        self._published_absent = self._published_lost = ""
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
            pending = self._pending()
            name, _, overdue_s = pending
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
        """Read the other ranks' heartbeats; a line about the rank that is lost, None if none is."""
        first = self.ranks[0]
        try:
            if self._rank == first:
                self._last = newest(self._keys, self.ranks, self._last, time.monotonic())
                absent = absent_ranks(self._last)
                self._set_absent_ranks(absent)
                if absent != self._published_absent:  # a FileStore keeps whatever is ever set
                    self._keys.set("absent", absent)
                    self._published_absent = absent
                lost = silent_rank(self._last, time.monotonic(), self._limit)
                if (lost or "") != self._published_lost:  # a rank that was stopped for a while goes on
                    self._published_lost = lost or ""
                    self._keys.set("lost", self._published_lost)
                return lost
            if lost := self._keys.get("lost"):
                return lost
            self._set_absent_ranks(self._keys.get("absent") or "")
            self._last = newest(self._keys, (first,), self._last, time.monotonic())
            return silent_rank(self._last, time.monotonic(), self._limit)
        except RuntimeError as error:  # c10d's only error: the connection is closed, or the store does not answer
            self._store_gone = self._store_gone or time.monotonic()
            return describe_gone(error)

    def _end(self, problem: str, collective: str) -> None:
        """Fail this rank's collectives, then end the rank, even where the backend never returns from failing them."""
        message = f"{problem}; rank {self._rank} waits in {collective}"
        threading.Thread(target=self._abort, args=(message,), daemon=True).start()
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
