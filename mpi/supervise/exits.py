"""How ranks exit: which exit caused the others, and its description."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from mpi.supervise.messages import printable

SETTLE_S = 0.5  # a rank's death makes its peers fail within this time; the first cause is searched among them
TOGETHER_S = 0.15  # exits that are noticed so close to each other may have happened in the other order
LAST_LINES = 15
STATUSES = range(-signal.SIGRTMAX, 256)  # that a process can exit with; negative: the signal that ended it


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """A rank's exit: its status (negative where a signal ended it), when it was noticed (monotonic), the last lines of
    its output and the log that has all of it."""

    rank: int
    host: str
    status: int
    time: float
    log: str
    tail: tuple[str, ...]


def first_cause(exits: Iterable[RankExit]) -> RankExit:
    """The exit that others followed from: the earliest; of those noticed together with it, one by a signal."""
    known = list(exits)
    earliest = min(one.time for one in known)
    together = [one for one in known if one.time - earliest <= TOGETHER_S]
    return min(together, key=lambda one: (one.status > 0, one.time, one.rank))


def describe_exit(one: RankExit) -> str:
    """A rank's exit in one line, and the last lines of its output."""
    how = f"was ended by {_signal_name(-one.status)}" if one.status < 0 else f"exited with status {one.status}"
    tail = "".join(f"\n  | {printable(line.rpartition(chr(13))[2])}" for line in one.tail[-LAST_LINES:])
    output = f"; its last lines:{tail}" if tail else "; it printed nothing"
    return f"rank {one.rank} on {one.host} {how}; log {one.log}{output}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal
