"""Which rank keeps the others of a job waiting: pure judgments of what each of them is doing."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from affinity.wording import counted, first_named
from mpi.supervise.activity import Activity
from mpi.supervise.exits import JobFailedError, RankExit, describe_exit

STOPPED_S = 8.0  # a rank may be stopped for so long; it is known up to six seconds later, in jobs of thousands eight
WAITING_S = 8.0  # idle for so long, a rank is taken to wait for others
AFTERWARDS_S = 10.0  # a rank that loses a peer, or gives up waiting, has exited by then: errors take time to print
MOST_STACKS = 3
STARTING_S = 180.0  # a job's first minutes, in which ranks import and compile, on slow disks one after another
WITHOUT_STACK_S = 30.0  # the first of them, in which a rank may not have come to offering its stack
ASK_AGAIN_S = 2.0  # after a stack that imports or compiles; twice as long each time
IMPORTING = "<frozen importlib."  # in a line of a stack
OF_PYTHON = re.compile(r"/lib/python3\.\d+/(?!site-packages/)")  # a file of the standard library

logger = logging.getLogger(__name__)

Stacks = Mapping[int, Sequence[str]]
"""Rank -> the lines of its Python stack, innermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A rank of a job: what it is doing, or was when it exited."""

    rank: int
    host: str
    activity: Activity = field(default_factory=Activity)
    exit: RankExit | None = None

    @property
    def place(self) -> str:
        """The rank as messages name it."""
        return f"rank {self.rank} on {self.host}"

    @property
    def left(self) -> bool:
        """Whether it has exited with status 0."""
        return self.exit is not None and self.exit.status == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The ranks for which others have waited, and what all ranks did at that time."""

    awaited: tuple[Standing, ...]
    standings: tuple[Standing, ...]


def stopped_rank(standings: Sequence[Standing]) -> Standing | None:
    """A rank that has been stopped for too long while another one may run; where all are stopped, nobody waits: the
    job was suspended, and goes on when it is continued."""
    running = [one for one in standings if one.exit is None]
    stopped = [one for one in running if one.activity.stopped_s > 0]
    if len(stopped) == len(running):
        return None
    first = max(stopped, key=lambda one: one.activity.stopped_s, default=None)
    return first if first is not None and first.activity.stopped_s >= STOPPED_S else None


def describe_stopped(one: Standing) -> str:
    """The failure of a stopped rank, in one line."""
    return f"{one.place} has been stopped for {one.activity.stopped_s:.0f} s: find the sender of its SIGSTOP"


def awaited_ranks(standings: Sequence[Standing], waiting_s: float = WAITING_S) -> tuple[Standing, ...]:
    """The ranks for which all others have waited this long, where they are not more than the others.

    They compute all the time, or are stopped, while the others are idle; or they have left, and all others are idle.
    A rank that computes may be right to do so: this is worth a message, and no reason to end a job.
    """
    here = [one for one in standings if not one.left]
    idle = [one for one in here if one.activity.idle_s >= waiting_s]
    rest = [one for one in here if one.activity.idle_s < waiting_s]
    if rest and any(one.exit or max(one.activity.busy_s, one.activity.stopped_s) < waiting_s for one in rest):
        return ()
    awaited = rest or [one for one in standings if one.left]
    return tuple(awaited) if len(awaited) <= len(idle) else ()


def left_before(cause: RankExit, standings: Sequence[Standing]) -> tuple[Standing, ...]:
    """The ranks that had left with status 0 just before another one failed, where they are not more than the others."""
    left = [one for one in standings if one.exit and one.left and 0.0 <= cause.time - one.exit.time <= AFTERWARDS_S]
    return tuple(left) if cause.status > 0 and len(left) <= sum(not one.left for one in standings) else ()


def able_to_show(stall: Stall) -> tuple[int, ...]:
    """The first of the awaited ranks whose Python stacks can be requested: they run."""
    running = [one.rank for one in stall.awaited if one.exit is None and not one.activity.stopped_s]
    return tuple(running[:MOST_STACKS])


def describe_stall(stall: Stall, stacks: Stacks) -> str:
    """What the awaited ranks do while the others wait, and where their code is, in one line: they may be right."""
    places = [f"rank {rank} is at {place}" for rank, lines in sorted(stacks.items()) if (place := _place(lines))]
    return _stalled(stall) + (f" ({', '.join(places)})" if places else "")


def is_starting(stall: Stall, stacks: Stacks, running_s: float, starting: Sequence[str]) -> bool:
    """Whether an awaited rank of a job that has run for so long imports, or has one of the texts `starting` in its
    stack; one that offers none has not come to that, or after some time has no Python."""
    if running_s >= STARTING_S:
        return False
    shown = [stacks.get(rank, ()) for rank in able_to_show(stall)]
    texts = (IMPORTING, *starting)
    return any(
        any(text in line for line in lines for text in texts) if lines else running_s < WITHOUT_STACK_S
        for lines in shown
    )


def _stalled(stall: Stall) -> str:
    awaited = stall.awaited
    idle = [one for one in stall.standings if one not in awaited and not one.left]
    one_awaited = len(awaited) == 1
    doing = "computes" if one_awaited else "compute"
    if awaited[0].left:
        doing = f"{'has' if one_awaited else 'have'} exited with status 0"
    elif awaited[0].activity.stopped_s:
        doing = f"{'is' if one_awaited else 'are'} stopped"
    others, have = first_named([f"rank {one.rank}" for one in idle]), "has" if len(idle) == 1 else "have"
    names, seconds = first_named([one.place for one in awaited]), min(one.activity.idle_s for one in idle)
    return f"{others} {have} waited {seconds:.0f} s for {names}, which {doing}"


def _place(lines: Sequence[str]) -> str | None:
    """The innermost frame outside Python's own library."""
    return next((line for line in lines if not OF_PYTHON.search(line)), None)


def describe_failure(cause: RankExit, standings: Sequence[Standing], stall: Stall | None, stacks: Stacks) -> str:
    """A failed job in one line and the last lines of output: first the rank that the failed one had waited for, where
    one is stopped, or there was a `stall` just before. `stacks` are those of its ranks."""
    stopped = [one for one in standings if one.exit is None and one.activity.stopped_s]
    if stopped and cause.status > 0:
        return f"{describe_stopped(stopped[0])}\nthen {describe_exit(cause)}"
    if stall is not None and cause.status > 0 and cause.rank not in [one.rank for one in stall.awaited]:
        listed = "".join(
            f"\n  Python stack of rank {rank}, innermost first:" + "".join(f"\n  | {line}" for line in lines)
            for rank, lines in sorted(stacks.items())
            if lines
        )
        return f"{_stalled(stall)}{listed}\nthen {describe_exit(cause)}"
    if left := left_before(cause, standings):
        names = first_named([one.place for one in left])
        others = counted(sum(not one.left for one in standings), "other")
        return f"{names} exited with status 0 while {others} still ran; then {describe_exit(cause)}"
    return describe_exit(cause)


class StallWatch:
    """Remembers which ranks the others have waited for, and says so once each time that it happens, later each time;
    a start that takes its time is not reported, and its stacks are requested ever less often. `starting` are texts
    in the stack of a rank that has not started yet."""

    def __init__(self, starting: Sequence[str] = ()) -> None:
        self._starting = starting
        self._begun: float | None = None
        self._last: tuple[float, Stall] | None = None
        self._waiting_s = WAITING_S
        self._reported: tuple[int, ...] = ()
        self._ask_at = 0.0
        self._pause_s = ASK_AGAIN_S

    def take(self, standings: tuple[Standing, ...], now: float, stacks_of: Callable[[Stall], Stacks]) -> str | None:
        """Take a reading of all ranks; the line about a stall where that is to be reported now."""
        self._begun = now if self._begun is None else self._begun
        awaited = awaited_ranks(standings)
        if not awaited:
            self._reported = ()
            return None
        stall, ranks = Stall(awaited=awaited, standings=standings), tuple(one.rank for one in awaited)
        self._last = now, stall
        running_s = now - self._begun
        if ranks == self._reported or not awaited_ranks(standings, self._waiting_s):
            return None
        if now < self._ask_at and running_s < STARTING_S:
            return None
        stacks = stacks_of(stall)
        if is_starting(stall, stacks, running_s, self._starting):
            self._ask_at, self._pause_s = now + self._pause_s, 2 * self._pause_s
            return None
        self._reported, self._waiting_s = ranks, 2 * self._waiting_s
        return describe_stall(stall, stacks)

    def check(self, standings: tuple[Standing, ...], now: float, stacks_of: Callable[[Stall], Stacks]) -> None:
        """Log which rank keeps the others waiting. Raises JobFailedError where one is stopped."""
        if stopped := stopped_rank(standings):
            raise JobFailedError(describe_stopped(stopped))
        if message := self.take(standings, now, stacks_of):
            logger.warning("cputrain: %s", message)

    def before(self, now: float) -> Stall | None:
        """The stall that lasted until just now, if any: ranks that give up waiting compute until they have exited."""
        return self._last[1] if self._last is not None and now - self._last[0] <= AFTERWARDS_S else None
