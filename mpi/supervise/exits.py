"""How ranks end: which end was the first cause of the others, and how it is told."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass

SETTLE_S = 0.5  # a rank's death makes its peers fail within this time; the first cause is looked for among them
TOGETHER_S = 0.15  # ends seen so close to each other may have come the other way round
LAST_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A rank's end: its status (negative where a signal ended it), when it was seen (monotonic), its last lines."""

    rank: int
    host: str
    status: int
    at: float
    log: str
    tail: tuple[str, ...]


def first_cause(ends: Iterable[End]) -> End:
    """The end that others followed from: the earliest; of those seen together with it, one by a signal."""
    known = list(ends)
    earliest = min(end.at for end in known)
    together = [end for end in known if end.at - earliest <= TOGETHER_S]
    return min(together, key=lambda end: (end.status > 0, end.at, end.rank))


def obituary(end: End) -> str:
    """A rank's end in one line, and its last lines."""
    how = f"was ended by {signal.Signals(-end.status).name}" if end.status < 0 else f"exited with status {end.status}"
    tail = "".join(f"\n  | {line}" for line in end.tail[-LAST_LINES:])
    shown = f"; its last lines:{tail}" if tail else "; it printed nothing"
    return f"rank {end.rank} on {end.host} {how}; log {end.log}{shown}"
