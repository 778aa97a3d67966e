"""The watchdog that ends a rank when a peer dies or hangs, so that no rank waits forever.

Each rank sends heartbeats to the job's store; rank 0 checks them and publishes which rank is silent. A rank that waits
in a collective is then ended; a rank that computes, or has left the job, depends on no peer and goes on. The watchdog
runs in threads of its own, with its own connection to the store.
"""

import atexit
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from affinity.wording import first_named
from mpi.supervise.connection import HEARTBEAT_S, HEARTBEAT_TIMEOUT_S

EXIT_S = 3.0  # from failing a rank's collectives, an error that its code may still report, to ending it
JOIN_S = 1.0
OVERDUE_S = 10.0  # for a backend to end a collective after its timeout, before the rank is ended

log = logging.getLogger(__name__)


class PendingCollective(NamedTuple):
    """The collective that a rank waits in ("": none), its sequence number, and the seconds since its timeout."""

    name: str
    sequence: int
    overdue_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A rank's heartbeat: `waits_in` is the collective that the rank waits in, `sequence` its number.

    `left`: the rank has left the job in order and sends no more heartbeats.
    """

    count: int
    host: str
    waits_in: str | None
    sequence: int
    left: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LastHeartbeat:
    """A rank's newest heartbeat, and when it arrived (this process's monotonic seconds)."""

    heartbeat: Heartbeat
    at: float


def silent_rank(last: dict[int, LastHeartbeat], now: float, silent_s: float) -> str | None:
    """A line about the rank that has been silent longest, if that is longer than `silent_s`; else None."""
    present = [rank for rank, seen in last.items() if not seen.heartbeat.left]
    rank = min(present, key=lambda rank: (last[rank].at, rank), default=None)
    if rank is None or (silent_for := now - last[rank].at) <= silent_s:
        return None
    heartbeat = last[rank].heartbeat
    where = _where(heartbeat)
    return f"rank {rank} on {heartbeat.host} has sent no heartbeat for {silent_for:.0f} s: it was last {where}"


def absent_ranks(last: dict[int, LastHeartbeat]) -> str:
    """A line about the ranks that have not joined the newest collective that others wait in; "" where none waits."""
    waiting = {rank: seen.heartbeat for rank, seen in last.items() if seen.heartbeat.waits_in}
    if not waiting:
        return ""
    newest = max(heartbeat.sequence for heartbeat in waiting.values())
    absent = [rank for rank in last if rank not in waiting or waiting[rank].sequence < newest]
    if not absent:
        return f"all ranks are in collective #{newest}, but not all in the same one"
    described = [f"rank {rank} on {last[rank].heartbeat.host} ({_where(last[rank].heartbeat)})" for rank in absent]
    return f"not joined by {first_named(described)}"


def _where(heartbeat: Heartbeat) -> str:
    if heartbeat.left:
        return "has left"
    return f"in {heartbeat.waits_in}" if heartbeat.waits_in else "in no collective"


class Watchdog:
    """Watches the ranks of a process group until `stop`, and ends this rank when a peer is lost.

    `pending` returns the collective that this rank waits in; `set_absent_ranks` receives the line about absent ranks,
    for the message of a timeout; `abort` fails this rank's collectives with a message.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        pending: Callable[[], PendingCollective],
        set_absent_ranks: Callable[[str], None],
        abort: Callable[[str], None],
        silent_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._pending, self._set_absent_ranks, self._abort = pending, set_absent_ranks, abort
        self._silent_s = silent_s
        self._count = 0
        self._last: dict[int, LastHeartbeat] = {}
        self._stopped = threading.Event()
        self._send_heartbeat()
        self._problem: str | None = None
        self._store_answered = time.monotonic()
        atexit.register(self.stop)  # a thread that is inside the store would not survive the interpreter's end
        # Two, as the first may hang in the store when rank 0 is stopped or cut off.
        self._threads = tuple(
            threading.Thread(target=target, name="cputrain-watchdog", daemon=True)
            for target in (self._exchange_heartbeats, self._end_when_peer_lost)
        )
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching; the other ranks expect no more heartbeats from this one."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        for thread in self._threads:
            thread.join(JOIN_S)
        if not any(thread.is_alive() for thread in self._threads):
            with suppress(RuntimeError):  # the store may have gone with rank 0
                self._send_heartbeat(left=True)

    def _exchange_heartbeats(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            self._problem = self._check_peers()
            self._store_answered = time.monotonic()

    def _end_when_peer_lost(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S / 2):
            silent_for = time.monotonic() - self._store_answered
            frozen = f"the job's store, in rank 0's process, has not answered for {silent_for:.0f} s"
            problem = frozen if silent_for > self._silent_s else self._problem
            name, _, overdue_s = self._pending()
            if overdue_s > OVERDUE_S:
                self._end(f"its timeout was {overdue_s:.0f} s ago, and the backend does not return", name)
            elif problem and name:
                self._end(problem, name)

    def _check_peers(self) -> str | None:
        """Send a heartbeat and read those of the others; a line about the rank that is lost, None if none is."""
        try:
            self._send_heartbeat()
            if self._rank == 0:
                self._read_heartbeats(range(self._world_size))
                absent = absent_ranks(self._last)
                self._set_absent_ranks(absent)
                self._store.set("absent", absent)
                lost = silent_rank(self._last, time.monotonic(), self._silent_s)
                if lost:
                    self._store.set("lost", lost)
                return lost
            if self._store.check(["lost"]):
                return self._store.get("lost").decode()
            if self._store.check(["absent"]):
                self._set_absent_ranks(self._store.get("absent").decode())
            self._read_heartbeats((0,))
            return silent_rank(self._last, time.monotonic(), self._silent_s)
        except RuntimeError as error:  # c10d's only error: the connection is closed, or the store does not answer
            cause = str(error).splitlines()[0][:150]
            return f"the job's store is gone, and with it rank 0's process or host ({cause})"

    def _send_heartbeat(self, *, left: bool = False) -> None:
        self._count += 1
        name, sequence, _ = self._pending()
        heartbeat = Heartbeat(
            count=self._count, host=socket.gethostname(), waits_in=name or None, sequence=sequence, left=left
        )
        self._store.set(f"heartbeat/{self._rank}", json.dumps(asdict(heartbeat)))

    def _read_heartbeats(self, ranks: range | tuple[int, ...]) -> None:
        started = [rank for rank in ranks if rank in self._last or self._store.check([f"heartbeat/{rank}"])]
        if not started:
            return
        now = time.monotonic()
        for rank, text in zip(started, self._store.multi_get([f"heartbeat/{rank}" for rank in started]), strict=True):
            heartbeat = Heartbeat(**json.loads(text))
            if rank not in self._last or self._last[rank].heartbeat.count != heartbeat.count:
                self._last[rank] = LastHeartbeat(heartbeat=heartbeat, at=now)

    def _end(self, problem: str, collective: str) -> None:
        """Fail this rank's collectives, then end the rank, even where the backend never returns from failing them."""
        message = f"{problem}; rank {self._rank} waits in {collective}"
        threading.Thread(target=self._abort, args=(message,), daemon=True).start()
        time.sleep(EXIT_S)
        if not self._stopped.is_set():
            log.error("cputrain: rank %d waits in %s: %s", self._rank, collective, problem)
            os._exit(1)
