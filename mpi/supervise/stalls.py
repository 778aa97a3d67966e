"""Which ranks keep the others waiting, and how that is known.

CPU time alone does not tell: a rank that waits in oneCCL or MPI polls, and one that waits for a disk is idle. What the
ranks say of their collectives proves it, or else their Python stacks. Without either, only what is seen is said.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from cputrain.affinity.wording import first_named, plural
from cputrain.mpi.supervise.processes import (
    IN_WAIT,
    ITS_DATA_THREAD,
    NO_ANSWER,
    SETTLE_S,
    JobFailedError,
    RankExit,
    describe_exit,
    place,
)
from cputrain.mpi.supervise.wire import Activity

STOPPED_S = 8.0  # limit for a stopped rank; it is noticed up to six seconds later, in jobs of thousands of ranks eight
WAITING_S = 8.0  # a rank that is idle, or in a collective, for this long is assumed to wait for others
AFTERWARDS_S = 10.0  # within this time a rank that lost a peer or timed out has exited: errors take time to print
MAX_STACKS = 3
STARTING_S = 180.0  # a job's first minutes, when ranks import and compile, on slow disks one after another
WITHOUT_STACK_S = 30.0  # the first part of it, in which a rank may not yet be able to dump its stack
SETTLES_S = 2.0  # after a rank has waited for WAITING_S, for other ranks to have done the same thing for half as long
ASK_AGAIN_S, MAX_ASK_AGAIN_S = 2.0, 60.0  # after stacks that import, compile or prove nothing; doubled each time
IMPORTING = "<frozen importlib."  # occurs in a stack during an import
# Innermost frames of a call that waits for other ranks: of torch, and of cputrain's groups and their store.
WAITS = re.compile(
    r"/torch/(distributed/(distributed_c10d|c10d_logger|rendezvous|_functional_collectives|nn/functional)\.py"
    r"|distributed/(fsdp|algorithms)/.*\.py|nn/parallel/distributed\.py):\d+ in "
    r"|/torch/distributed/utils\.py:\d+ in (_verify_param_shape_across_processes|_sync_params_and_buffers)$"
    r"|/cputrain/comm/(group|store|ccl/__init__)\.py:\d+ in "
    rf"|{re.escape(IN_WAIT)}$"
)
# Functional collectives are operators of torch: frames between them and the call in C++.
OF_OPERATORS = re.compile(r"/torch/(_ops|_library/autograd)\.py:\d+ in ")
# A rank that is idle in torch's backward pass waits for DistributedDataParallel's all-reduce.
BACKWARD = re.compile(r"/torch/autograd/(graph|__init__)\.py:\d+ in (_engine_run_)?backward$")

logger = logging.getLogger(__name__)

Stacks = Mapping[int, Sequence[str]]
"""Rank -> the lines of its Python stack, innermost first."""


class Doing(Enum):
    """What a rank does instead of waiting, in words for one rank and for several."""

    EXITED = ("has exited with status 0", "have exited with status 0")
    STOPPED = ("is stopped", "are stopped")
    BLOCKED = ("is blocked", "are blocked")
    COMPUTING = ("computes", "compute")
    POLLING = ("computes or polls", "compute or poll")
    SLOW = ("is slow", "are slow")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """A rank's state: what it is doing, or was doing when it exited."""

    rank: int
    host: str
    activity: Activity = field(default_factory=Activity)
    exit: RankExit | None = None

    @property
    def place(self) -> str:
        """The rank and its host for messages."""
        return f"rank {self.rank} on {self.host}"

    @property
    def finished(self) -> bool:
        """Whether it has exited with status 0."""
        return self.exit is not None and self.exit.status == 0

    @property
    def waited_s(self) -> float:
        """How long it has waited, as far as is known: in a collective, or idle."""
        return max(self.activity.waited_s, self.activity.idle_s) if self.exit is None else 0.0

    @property
    def doing(self) -> "Doing":
        """What it does instead of waiting in a collective."""
        if self.finished:
            return Doing.EXITED
        if self.activity.stopped_s >= WAITING_S / 2:
            return Doing.STOPPED
        if self.activity.idle_s >= WAITING_S / 2:
            return Doing.BLOCKED
        return Doing.COMPUTING if self.activity.busy_s >= WAITING_S / 2 else Doing.SLOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The ranks that wait, those that they wait for, and the state of all ranks at that time. `proven`: by collectives
    or stacks; else the `waiting` ranks are idle, the `awaited` ones are not, and who waits for whom is unknown."""

    waiting: tuple[RankState, ...]
    awaited: tuple[RankState, ...]
    rank_states: tuple[RankState, ...]
    proven: bool = True

    @property
    def seconds(self) -> float:
        """How long all of the waiting ranks have waited."""
        return min(rank.waited_s for rank in self.waiting)

    @property
    def lasts_s(self) -> float:
        """How long the stall has lasted as far as is known: the longest that one of its ranks has waited or been
        idle."""
        return max(rank.waited_s for rank in (*self.waiting, *self.awaited))

    def now(self, rank_states: tuple[RankState, ...]) -> "Stall":
        """Return the same stall with later states of the ranks."""
        state = {rank.rank: rank for rank in rank_states}
        waiting, awaited = (tuple(state[rank.rank] for rank in ranks) for ranks in (self.waiting, self.awaited))
        return replace(self, waiting=waiting, awaited=awaited, rank_states=rank_states)


def stopped_rank(rank_states: Sequence[RankState]) -> RankState | None:
    """Return a rank that has been stopped (SIGSTOP) for too long while another one runs, or None. If all are stopped,
    the job was suspended as a whole and continues later."""
    running = [rank for rank in rank_states if rank.exit is None]
    stopped = [rank for rank in running if rank.activity.stopped_s > 0]
    if len(stopped) == len(running):
        return None
    first = max(stopped, key=lambda rank: rank.activity.stopped_s, default=None)
    return first if first is not None and first.activity.stopped_s >= STOPPED_S else None


def describe_stopped(rank: RankState) -> str:
    """Describe a stopped rank in one line."""
    return f"{rank.place} has been stopped for {rank.activity.stopped_s:.0f} s: find the sender of its SIGSTOP"


def find_absent_ranks(rank_states: tuple[RankState, ...]) -> Stall | None:
    """Return the ranks that have not called a collective in which others have long waited; None if there are none.

    Of these, ranks that themselves wait in another collective or message are left out, unless all do.
    """
    waiting = [rank for rank in rank_states if rank.exit is None and rank.activity.waited_s >= WAITING_S]
    sought = {(rank.activity.group, rank.activity.number) for rank in waiting if rank.activity.group}
    absent = [rank for rank in rank_states if any(group_calls(rank, group) < number for group, number in sought)]
    first = [rank for rank in absent if rank.activity.waited_s < WAITING_S / 2] or absent
    later = [rank for rank in waiting if rank not in first]
    return Stall(waiting=tuple(later), awaited=tuple(first), rank_states=rank_states) if first and later else None


def group_calls(rank: RankState, group: str) -> float:
    """Return how many collectives of a group a rank has called; infinitely many if it is not in the group."""
    return dict(rank.activity.calls).get(group, float("inf"))


def ranks_outside(rank_states: tuple[RankState, ...], stacks: Stacks) -> Stall | None:
    """Return the ranks whose stacks are in no collective, else those without a stack, else those that have exited,
    while others wait in one; None if there are none, or if they compute and outnumber the others, as the waiting ones
    are then early."""
    running = [rank for rank in rank_states if rank.exit is None]
    inside = [rank for rank in running if waits(rank, stacks.get(rank.rank, ()))]
    waiting = [rank for rank in inside if rank.waited_s >= WAITING_S / 2]
    missing = [rank for rank in running if rank not in inside]
    shown = [rank for rank in missing if stacks.get(rank.rank, ()) not in ((), (NO_ANSWER,))]
    outside = shown or missing or [rank for rank in rank_states if rank.finished]
    computing = [rank for rank in outside if rank.doing is Doing.COMPUTING]
    if not waiting or not outside or len(computing) > len(waiting):
        return None
    return Stall(waiting=tuple(waiting), awaited=tuple(outside), rank_states=rank_states)


def waits(rank: RankState, stack: Sequence[str]) -> bool:
    """Return whether a rank with this stack waits for others in a collective, a message, or the start of a group."""
    idle = rank.activity.idle_s >= WAITING_S / 2 or rank.activity.waited_s >= WAITING_S / 2
    frame = next((line for line in stack if not OF_OPERATORS.search(line)), "")
    return bool(WAITS.search(frame) or (idle and BACKWARD.search(frame)))


def idle_ranks(rank_states: tuple[RankState, ...], stacks: Stacks) -> Stall | None:
    """Return the ranks that have long been idle while all others, who do not outnumber them, compute or have exited
    with status 0; or all of them, if they are at different lines of code. This is no proof that some wait for others,
    and may be right, so it deserves a message but does not end the job."""
    unfinished = [rank for rank in rank_states if not rank.finished]
    idle = [rank for rank in unfinished if rank.activity.idle_s >= WAITING_S and rank.exit is None]
    active = [rank for rank in unfinished if rank not in idle]
    if any(rank.exit or max(rank.activity.busy_s, rank.activity.stopped_s) < WAITING_S for rank in active):
        return None
    # These are not computing: this is soon proven, or they send a large message.
    if any(rank.activity.collective for rank in active):
        return None
    awaited = active or [rank for rank in rank_states if rank.finished]
    lines_reached = {place(lines) for lines in stacks.values() if lines}
    if not idle or len(awaited) > len(idle) or (not awaited and len(lines_reached) < 2):
        return None
    return Stall(waiting=tuple(idle), awaited=tuple(awaited), rank_states=rank_states, proven=False)


def finished_before(cause: RankExit, rank_states: Sequence[RankState]) -> tuple[RankState, ...]:
    """Return the ranks that exited with status 0 just before another one failed, unless they outnumber the others. A
    rank closes its connections before it exits, so that its peer's failure may be noticed up to SETTLE_S earlier."""
    finished = [
        rank
        for rank in rank_states
        if rank.exit and rank.finished and -SETTLE_S <= cause.time - rank.exit.time <= AFTERWARDS_S
    ]
    return (
        tuple(finished) if cause.by_itself and len(finished) <= sum(not rank.finished for rank in rank_states) else ()
    )


def is_where_it_was(activity: Activity, seconds: float) -> bool:
    """Return whether a rank whose stack was read so many seconds ago is still there: it has been idle since, or this
    was just now."""
    return seconds <= max(activity.idle_s, AFTERWARDS_S)


def inspectable_ranks(ranks: Sequence[RankState]) -> tuple[int, ...]:
    """Return the ranks whose Python stacks can be requested because they are running."""
    return tuple(rank.rank for rank in ranks if rank.exit is None and rank.doing is not Doing.STOPPED)


def describe_stall(stall: Stall, stacks: Stacks) -> str:
    """Describe in one line which ranks wait, what the awaited ranks do instead, and where their code is; they may be
    right."""
    shown = stall.awaited if stall.proven else (*stall.awaited[:1], *stall.waiting)
    positions = [
        ", ".join(
            (f"rank {number} is at {place(stack)}", *(line for line in stack if line.startswith(ITS_DATA_THREAD)))
        )
        for number in sorted(rank.rank for rank in shown[:MAX_STACKS])
        if place(stack := stacks.get(number, ()))
    ]
    return _stalled(stall) + (f" ({', '.join(positions)})" if positions else "")


def is_starting(stall: Stall, stacks: Stacks, running_s: float, starting: Sequence[str]) -> bool:
    """Return whether an awaited rank, or any one if it is unknown who is awaited, is still starting: it imports, or has
    one of the texts `starting` in its stack, or does not dump its stack yet. A job counts as starting for STARTING_S; a
    rank without a stack for WITHOUT_STACK_S, after which it is assumed to run no Python."""
    if running_s >= STARTING_S:
        return False
    queried = stall.awaited if stall.proven else (*stall.awaited, *stall.waiting)
    shown = [stacks.get(rank, ()) for rank in inspectable_ranks(queried)]
    texts = (IMPORTING, *starting)
    return any(
        any(text in line for line in lines for text in texts) if lines else running_s < WITHOUT_STACK_S
        for lines in shown
    )


def _stalled(stall: Stall) -> str:
    have = "has" if len(stall.waiting) == 1 else "have"
    begun, seconds = f"{first_named([f'rank {rank.rank}' for rank in stall.waiting])} {have}", f"{stall.seconds:.0f} s"
    if not stall.awaited:
        return f"{begun} been idle for {seconds}, at different lines of code"
    several = len(stall.awaited) > 1
    doing = {rank.rank: rank.doing for rank in stall.awaited}
    if not stall.proven:  # a rank that polls, in MPI for example, looks busy
        doing = {rank: Doing.POLLING if what is Doing.COMPUTING else what for rank, what in doing.items()}
    names = first_named([rank.place for rank in stall.awaited])
    what = next(iter(doing.values())).value[several]
    if several and len(set(doing.values())) > 1:
        names, what = first_named([f"{rank.place} ({doing[rank.rank].value[0]})" for rank in stall.awaited]), ""
    if stall.proven:
        return f"{begun} waited {seconds} for {names}" + (f", which {what}" if what else "")
    return f"{begun} been idle for {seconds}, " + (f"and {names} {what}" if what else f"unlike {names}")


def describe_failure(cause: RankExit, rank_states: Sequence[RankState], stall: Stall | None, stacks: Stacks) -> str:
    """Describe a failed job in one line, followed by the last lines of output. If the failed rank had waited for a rank
    that is stopped, or there was a `stall` just before, that comes first. `stacks` are the stacks of its ranks."""
    stopped = [rank for rank in rank_states if rank.exit is None and rank.doing is Doing.STOPPED]
    if stopped and cause.by_itself:
        return f"{describe_stopped(stopped[0])}\nthen {describe_exit(cause)}"
    if stall is not None and cause.by_itself and cause.rank not in [rank.rank for rank in stall.awaited]:
        listed = "".join(
            f"\n  Python stack of rank {rank}, innermost first:" + "".join(f"\n  | {line}" for line in lines)
            for rank, lines in sorted(stacks.items())
            if lines
        )
        return f"{_stalled(stall)}{listed}\nthen {describe_exit(cause)}"
    if finished := finished_before(cause, rank_states):
        names = first_named([rank.place for rank in finished])
        if any(rank.exit and rank.exit.time > cause.time for rank in finished):
            return f"{names} exited with status 0, and at the same time {describe_exit(cause)}"
        remaining = plural(sum(not rank.finished for rank in rank_states), "other")
        return f"{names} exited with status 0 while {remaining} still ran; then {describe_exit(cause)}"
    return describe_exit(cause)


def _is_soon_proven(rank_states: Sequence[RankState]) -> bool:
    """Return whether a rank waits in a collective, but not yet for long."""
    return any(0.0 < rank.activity.waited_s < WAITING_S for rank in rank_states if rank.exit is None)


def _is_settled(rank_states: Sequence[RankState], suspected_s: float) -> bool:
    """Return whether it is clear of each rank what it does, or will not be."""
    return suspected_s >= SETTLES_S or all(rank.finished or rank.doing is not Doing.SLOW for rank in rank_states)


class StallWatch:
    """Record which ranks the others wait for, and report each case once, after longer waits each time. Slow starts are
    not reported, and stacks that show a start, or prove nothing, are requested less and less often until another rank
    waits. `starting` are texts in the stack of a rank that has not started yet."""

    def __init__(self, starting: Sequence[str] = ()) -> None:
        self._starting = starting
        self._begun: float | None = None
        self._last: tuple[float, Stall] | None = None
        self._waiting_s = WAITING_S
        self._suspected_at: float | None = None
        self._suspects: tuple[int, ...] = ()  # the ranks that had long waited when the last stall was found
        self._reported: tuple[int, ...] | None = None
        self._seen: tuple[int, ...] = ()  # the ranks that had long waited at the last reading
        self._asked_at = self._ask_at = float("-inf")
        self._pause_s = ASK_AGAIN_S

    def take(
        self, rank_states: tuple[RankState, ...], now: float, stacks_of: Callable[[Sequence[int]], Stacks]
    ) -> str | None:
        """Take a reading of all ranks; return the line about a stall if it is to be reported now. `stacks_of` returns
        the stacks of running ranks."""
        self._begun = now if self._begun is None else self._begun
        suspects = tuple(rank.rank for rank in rank_states if rank.waited_s >= WAITING_S)
        if {*suspects} - {*self._seen}:
            self._ask_at, self._pause_s = min(self._ask_at, self._asked_at + ASK_AGAIN_S), ASK_AGAIN_S
        self._seen = suspects
        if not suspects:
            self._reported, self._suspected_at = None, None
            return None
        self._suspected_at = now if self._suspected_at is None else self._suspected_at
        if self._last is not None and self._reported is not None and suspects == self._suspects:
            self._last = now, self._last[1].now(rank_states)
            return None
        running_s = now - self._begun
        if now < self._ask_at:
            return None
        absent = find_absent_ranks(rank_states)
        if absent is None and (_is_soon_proven(rank_states) or not _is_settled(rank_states, now - self._suspected_at)):
            return None  # a request for a stack may interrupt a call in C, so it is made when it can prove something
        self._asked_at = now
        stacks = stacks_of(inspectable_ranks(absent.awaited[:MAX_STACKS] if absent else rank_states))
        stall = absent or ranks_outside(rank_states, stacks) or idle_ranks(rank_states, stacks)
        if stall is not None:
            self._last, self._suspects = (now, stall), suspects
        if stall is None or is_starting(stall, stacks, running_s, self._starting):
            started = self._begun + STARTING_S
            self._ask_at = min(now + self._pause_s, started if now < started else float("inf"))
            self._pause_s = min(2 * self._pause_s, MAX_ASK_AGAIN_S)
            return None
        awaited = tuple(rank.rank for rank in stall.awaited)
        if awaited == self._reported or any(rank.doing is Doing.STOPPED for rank in stall.awaited):
            return None  # told before, or soon by `check`, unless the rank is continued
        if stall.lasts_s < self._waiting_s:
            self._ask_at = now + self._waiting_s - stall.lasts_s
            return None
        self._reported, self._waiting_s = awaited, 2 * self._waiting_s
        return describe_stall(stall, stacks)

    def check(
        self, rank_states: tuple[RankState, ...], now: float, stacks_of: Callable[[Sequence[int]], Stacks]
    ) -> None:
        """Log which rank keeps the others waiting. Raises JobFailedError if one is stopped."""
        if stopped := stopped_rank(rank_states):
            raise JobFailedError(describe_stopped(stopped))
        if message := self.take(rank_states, now, stacks_of):
            logger.warning("cputrain: %s", message)

    def before(self, now: float) -> Stall | None:
        """Return the stall that lasted until just now, if any: ranks that time out compute until they have exited."""
        return self._last[1] if self._last is not None and now - self._last[0] <= AFTERWARDS_S else None
