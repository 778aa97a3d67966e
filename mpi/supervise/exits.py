"""How ranks exit: which exit caused the others, and its description."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from affinity.errors import RunError
from affinity.terminal_text import printable
from mpi.supervise.memory import Shortage

SETTLE_S = 0.5  # a rank's death makes its peers fail within this time; the first cause is searched among them
TOGETHER_S = 0.15  # exits that are noticed so close to each other may have happened in the other order
LAST_LINES = 15
STATUSES = range(-signal.SIGRTMAX, 256)  # that a process can exit with; negative: the signal that ended it


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """A rank's exit: its status (negative where a signal ended it), when it was noticed (monotonic), the last lines of
    its output and the log that has all of it. `shortage`: the kernel has just killed it, or a process near it, for lack
    of memory."""

    rank: int
    host: str
    status: int
    time: float
    log: str
    tail: tuple[str, ...]
    shortage: Shortage | None = None


class JobFailedError(RunError):
    """A job failed. `shortage`: for lack of memory. `hosts`: those that may be down. `tail`: the last lines of the rank
    that failed first."""

    def __init__(
        self,
        message: str,
        *,
        shortage: Shortage | None = None,
        hosts: tuple[str, ...] = (),
        tail: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.shortage = shortage
        self.hosts = hosts
        self.tail = tail

    def advised(self, advice: str) -> "JobFailedError":
        """The same failure, with a line about what to do."""
        return JobFailedError(f"{self}\n{advice}", shortage=self.shortage, hosts=self.hosts, tail=self.tail)


def first_cause(exits: Iterable[RankExit]) -> RankExit:
    """The exit that others followed from: the earliest; of those noticed together with it, one by a signal."""
    known = list(exits)
    earliest = min(one.time for one in known)
    together = [one for one in known if one.time - earliest <= TOGETHER_S]
    return min(together, key=lambda one: (one.status > 0, one.time, one.rank))


def describe_exit(one: RankExit) -> str:
    """A rank's exit in one line, and the last lines of its output."""
    how = describe_status(one.status)
    if one.shortage is not None:
        how += f", {one.shortage}" if one.status < 0 else f" after the kernel had killed a process, {one.shortage}"
    tail = "".join(f"\n  | {printable(line.rpartition(chr(13))[2])}" for line in one.tail[-LAST_LINES:])
    output = f"; its last lines:{tail}" if tail else "; it printed nothing"
    return f"rank {one.rank} on {one.host} {how}; log {one.log}{output}"


def signal_name(number: int) -> str:
    """A signal as messages name it: "SIGTERM"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal


def describe_status(status: int) -> str:
    """What a process did: "exited with status 3", "was ended by SIGKILL" (a negative status)."""
    return f"exited with status {status}" if status >= 0 else f"was ended by {signal_name(-status)}"
