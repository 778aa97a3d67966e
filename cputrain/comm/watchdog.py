"""No rank waits for ever: each shows signs of life in the job's store, rank 0 judges them, all end with the one lost.

A thread of each rank, with a connection of its own to the store. Only a rank that waits in a collective is ended: one
that computes, or has left, needs nobody.
"""

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

from torch._C._distributed_c10d import Store

BEAT_S = 2.0
SILENT_S = 15.0
EXIT_S = 3.0  # between failing a rank's collectives, which its code may tell in its own way, and ending it
LEAVE_S = 1.0
OVERDUE_S = 10.0  # for a backend to end what has timed out, before the rank is ended
MOST_NAMED = 5


class Waiting(NamedTuple):
    """What a rank waits in ("": nothing), that collective's number, and for how long it should have ended."""

    what: str
    sequence: int
    overdue_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A rank's sign of life: `waits_in` is the collective that it waits in, `sequence` that one's number.

    `left`: it has ended its part in order, and gives no more signs.
    """

    count: int
    host: str
    waits_in: str | None
    sequence: int
    left: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A rank's last beat, and when it changed (monotonic seconds here)."""

    beat: Beat
    at: float


def silent_rank(heard: dict[int, Heard], now: float, silent_s: float) -> str | None:
    """The rank that has been silent longest, if that is too long, as one line."""
    present = [rank for rank, seen in heard.items() if not seen.beat.left]
    rank = min(present, key=lambda rank: (heard[rank].at, rank), default=None)
    if rank is None or (quiet := now - heard[rank].at) <= silent_s:
        return None
    beat = heard[rank].beat
    last = f"it was in {beat.waits_in}" if beat.waits_in else "it was in no collective"
    return f"rank {rank} on {beat.host} has given no sign of life for {quiet:.0f} s: {last} when last heard of"


def absent_ranks(heard: dict[int, Heard]) -> str:
    """Who has not joined the newest collective that others wait in; empty where nobody waits."""
    waiting = {rank: seen.beat for rank, seen in heard.items() if seen.beat.waits_in}
    if not waiting:
        return ""
    newest = max(beat.sequence for beat in waiting.values())
    absent = [rank for rank in heard if rank not in waiting or waiting[rank].sequence < newest]
    if not absent:
        return f"all ranks are in collective #{newest}, but not all in the same one"
    told = []
    for rank in absent[:MOST_NAMED]:
        beat = heard[rank].beat
        where = "has left" if beat.left else f"in {beat.waits_in}" if beat.waits_in else "in no collective"
        told.append(f"rank {rank} on {beat.host} ({where})")
    more = f" and {len(absent) - MOST_NAMED} more" if len(absent) > MOST_NAMED else ""
    return f"not joined by {', '.join(told)}{more}"


class Watchdog:
    """Watches over one process group until `stop`.

    `waits_in` tells the collective that this rank waits in; `note` takes who else is absent, for the message of a
    timeout; `fail` ends this rank's collectives with an error.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        waits_in: Callable[[], Waiting],
        note: Callable[[str], None],
        fail: Callable[[str], None],
        silent_s: float = SILENT_S,
    ) -> None:
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._waits_in, self._note, self._fail = waits_in, note, fail
        self._silent_s = silent_s
        self._count = 0
        self._heard: dict[int, Heard] = {}
        self._over = threading.Event()
        self._beat()
        self._lost: str | None = None
        self._looked = time.monotonic()
        atexit.register(self.stop)  # a thread that is inside the store would not survive the interpreter's end
        # Two, as the first may hang in the store when rank 0 is stopped or cut off.
        self._threads = tuple(
            threading.Thread(target=target, name="cputrain-watchdog", daemon=True)
            for target in (self._listen, self._act)
        )
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Watch no longer; the others need not hear of this rank from now on."""
        if self._over.is_set():
            return
        self._over.set()
        for thread in self._threads:
            thread.join(LEAVE_S)
        if not any(thread.is_alive() for thread in self._threads):
            with suppress(RuntimeError):  # the store may have gone with rank 0
                self._beat(left=True)

    def _listen(self) -> None:
        while not self._over.wait(BEAT_S):
            self._lost = self._look()
            self._looked = time.monotonic()

    def _act(self) -> None:
        while not self._over.wait(BEAT_S / 2):
            quiet = time.monotonic() - self._looked
            frozen = f"the job's store, in rank 0's process, has given no answer for {quiet:.0f} s"
            lost = frozen if quiet > self._silent_s else self._lost
            what, _, overdue_s = self._waits_in()
            if overdue_s > OVERDUE_S:
                self._end(f"it should have ended {overdue_s:.0f} s ago, and the backend does not return", what)
            elif lost and what:
                self._end(lost, what)

    def _look(self) -> str | None:
        """Beat and hear the others; the line about the one who is lost, if one is."""
        try:
            self._beat()
            if self._rank == 0:
                self._hear(range(self._world_size))
                absent = absent_ranks(self._heard)
                self._note(absent)
                self._store.set("absent", absent)
                lost = silent_rank(self._heard, time.monotonic(), self._silent_s)
                if lost:
                    self._store.set("lost", lost)
                return lost
            if self._store.check(["lost"]):
                return self._store.get("lost").decode()
            if self._store.check(["absent"]):
                self._note(self._store.get("absent").decode())
            self._hear((0,))
            return silent_rank(self._heard, time.monotonic(), self._silent_s)
        except RuntimeError as error:  # c10d's store has one kind of error: the other end is gone, or says nothing
            return f"the job's store is gone, and with it rank 0's process or host ({str(error).splitlines()[0][:150]})"

    def _beat(self, *, left: bool = False) -> None:
        self._count += 1
        what, sequence, _ = self._waits_in()
        beat = Beat(count=self._count, host=socket.gethostname(), waits_in=what or None, sequence=sequence, left=left)
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))

    def _hear(self, ranks: range | tuple[int, ...]) -> None:
        begun = [rank for rank in ranks if rank in self._heard or self._store.check([f"beat/{rank}"])]
        if not begun:
            return
        now = time.monotonic()
        for rank, text in zip(begun, self._store.multi_get([f"beat/{rank}" for rank in begun]), strict=True):
            beat = Beat(**json.loads(text))
            if rank not in self._heard or self._heard[rank].beat.count != beat.count:
                self._heard[rank] = Heard(beat=beat, at=now)

    def _end(self, lost: str, what: str) -> None:
        """Fail this rank's collectives, then end the rank, even where the backend never returns from failing them."""
        threading.Thread(target=self._fail, args=(f"{lost}; rank {self._rank} waits in {what}",), daemon=True).start()
        time.sleep(EXIT_S)
        if not self._over.is_set():
            print(f"cputrain: rank {self._rank} waits in {what}: {lost}", file=sys.stderr, flush=True)
            os._exit(1)
