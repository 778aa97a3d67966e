"""What the ranks of a job are doing: which wait for which, which failed first, which hosts are silent.

Time that a process waits for a core counts as computing, because a shared host may give it little CPU time.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cputrain.affinity.filesystem import read_stat
from cputrain.affinity.ranks.host_names import host_labels, is_loopback
from cputrain.affinity.ranks.rank import LOOPBACK
from cputrain.affinity.wording import first_named, plural
from cputrain.mpi.supervise.processes import (
    LAST_LINES,
    STATUSES,
    JobFailedError,
    OutOfMemory,
    RankExit,
    describe_exit,
    first_cause,
    signal_name,
)
from cputrain.mpi.supervise.signals import RunningClock
from cputrain.mpi.supervise.wire import (
    ANSWER_S,
    HEARTBEAT_TIMEOUT_S,
    Activity,
    Answer,
    Exit,
    Hello,
    Preempt,
    RankServer,
    ShowStack,
    Signaled,
    Stack,
    Stop,
)
from cputrain.mpi.usage import children_of

READ_S = 2.0  # between two readings of a rank
IDLE_CORES = 0.05  # a rank with less demand is waiting; heartbeats and progress bars take some CPU time
BUSY_CORES = 0.5  # a rank with more demand is computing
STOPPED = "T"  # stopped by a signal, not by a debugger (state "t"): proc(5), /proc/PID/stat
NANOSECOND_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTime:
    """CPU demand of one or more processes in seconds: CPU time, with ended children's, plus the time that the main
    threads waited for a core; and whether one of the processes is stopped."""

    demand_s: float
    stopped: bool


class ActivityMeter:
    """Measure the activity of the rank whose first process is `pid`. Times are in seconds of one clock.

    Descendants are read only while that process itself is idle: a process that waits for a child, such as a shell, is
    as busy as the child.
    """

    def __init__(self, pid: int, now: float) -> None:
        self._pid = pid
        self._at = self._idle_since = self._busy_since = now
        self._stopped_since: float | None = None
        self._root = read_process(pid)
        self._below: ProcessTime | None = None
        self.activity = Activity()

    def read(self, now: float) -> None:
        """Take a reading if one is due; a process that has ended keeps its last one."""
        if now - self._at < READ_S or (root := read_process(self._pid)) is None:
            return
        seconds = now - self._at
        demand = root.demand_s - self._root.demand_s if self._root else 0.0
        below = read_below(self._pid) if demand < IDLE_CORES * seconds else None
        if below is not None and self._below is not None:
            demand += max(0.0, below.demand_s - self._below.demand_s)
            idle, busy = demand < IDLE_CORES * seconds, demand >= BUSY_CORES * seconds
        else:  # nothing is known about the children yet
            idle, busy = False, below is None and demand >= BUSY_CORES * seconds
        self._idle_since = self._idle_since if idle else now
        self._busy_since = self._busy_since if busy else now
        stopped = root.stopped or (idle and below is not None and below.stopped)
        self._stopped_since = (self._stopped_since or self._at) if stopped else None
        self._at, self._root, self._below = now, root, below
        self.activity = Activity(
            stopped_s=0.0 if self._stopped_since is None else now - self._stopped_since,
            idle_s=now - self._idle_since,
            busy_s=now - self._busy_since,
        )


def read_process(pid: int) -> ProcessTime | None:
    """Read a process's times; None if it has ended."""
    try:
        stat = read_stat(pid)
    except OSError:
        return None
    if stat.state in "ZX":
        return None
    waited_s = 0.0
    with suppress(OSError, IndexError):  # a kernel without scheduler statistics
        waited_s = int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[1]) * NANOSECOND_S
    return ProcessTime(demand_s=stat.cpu_s + waited_s, stopped=stat.state == STOPPED)


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants, parents before children."""
    found = [pid]
    for one in found:
        with suppress(OSError):  # ended meanwhile
            found += children_of(one)
    return found


def read_below(pid: int) -> ProcessTime:
    """Return the summed times of all descendants of this process."""
    read = [one for child in tree(pid)[1:] if (one := read_process(child))]
    return ProcessTime(demand_s=sum(one.demand_s for one in read), stopped=any(one.stopped for one in read))


STOPPED_S = 8.0  # limit for a stopped rank; it is noticed up to six seconds later, in jobs of thousands of ranks eight
WAITING_S = 8.0  # a rank that is idle for this long is assumed to wait for others
AFTERWARDS_S = 10.0  # within this time a rank that lost a peer or timed out has exited: errors take time to print
MOST_STACKS = 3
STARTING_S = 180.0  # a job's first minutes, when ranks import and compile, on slow disks one after another
WITHOUT_STACK_S = 30.0  # the first part of it, in which a rank may not yet be able to dump its stack
ASK_AGAIN_S = 2.0  # after a stack that imports or compiles; doubled each time
IMPORTING = "<frozen importlib."  # occurs in a stack during an import
OF_PYTHON = re.compile(r"/lib/python3\.\d+/(?!site-packages/)")  # files of the standard library

logger = logging.getLogger(__name__)

Stacks = Mapping[int, Sequence[str]]
"""Rank -> the lines of its Python stack, innermost first."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The ranks that others have waited for, and the state of all ranks at that time."""

    awaited: tuple[RankState, ...]
    rank_states: tuple[RankState, ...]


def stopped_rank(rank_states: Sequence[RankState]) -> RankState | None:
    """Return a rank that has been stopped (SIGSTOP) for too long while another one runs, or None. If all are stopped,
    the job was suspended as a whole and continues later."""
    running = [one for one in rank_states if one.exit is None]
    stopped = [one for one in running if one.activity.stopped_s > 0]
    if len(stopped) == len(running):
        return None
    first = max(stopped, key=lambda one: one.activity.stopped_s, default=None)
    return first if first is not None and first.activity.stopped_s >= STOPPED_S else None


def describe_stopped(one: RankState) -> str:
    """Describe a stopped rank in one line."""
    return f"{one.place} has been stopped for {one.activity.stopped_s:.0f} s: find the sender of its SIGSTOP"


def awaited_ranks(rank_states: Sequence[RankState], waiting_s: float = WAITING_S) -> tuple[RankState, ...]:
    """Return the ranks that all others have waited for this long, unless they outnumber the others.

    They compute all the time, or are stopped, while the others are idle; or they have exited with status 0, and all
    others are idle. Computing may be right, so this deserves a message but does not end the job.
    """
    here = [one for one in rank_states if not one.finished]
    idle = [one for one in here if one.activity.idle_s >= waiting_s]
    rest = [one for one in here if one.activity.idle_s < waiting_s]
    if rest and any(one.exit or max(one.activity.busy_s, one.activity.stopped_s) < waiting_s for one in rest):
        return ()
    awaited = rest or [one for one in rank_states if one.finished]
    return tuple(awaited) if len(awaited) <= len(idle) else ()


def finished_before(cause: RankExit, rank_states: Sequence[RankState]) -> tuple[RankState, ...]:
    """Return the ranks that exited with status 0 just before another one failed, unless they outnumber the others."""
    finished = [
        one for one in rank_states if one.exit and one.finished and 0.0 <= cause.time - one.exit.time <= AFTERWARDS_S
    ]
    return tuple(finished) if cause.by_itself and len(finished) <= sum(not one.finished for one in rank_states) else ()


def inspectable_ranks(stall: Stall) -> tuple[int, ...]:
    """Return the first awaited ranks whose Python stacks can be requested because they are running."""
    running = [one.rank for one in stall.awaited if one.exit is None and not one.activity.stopped_s]
    return tuple(running[:MOST_STACKS])


def describe_stall(stall: Stall, stacks: Stacks) -> str:
    """Describe in one line what the awaited ranks do while others wait, and where their code is; they may be right."""
    places = [f"rank {rank} is at {place}" for rank, lines in sorted(stacks.items()) if (place := _place(lines))]
    return _stalled(stall) + (f" ({', '.join(places)})" if places else "")


def is_starting(stall: Stall, stacks: Stacks, running_s: float, starting: Sequence[str]) -> bool:
    """Return whether an awaited rank is still starting: it imports, or has one of the texts `starting` in its stack, or
    does not dump its stack yet. A job counts as starting for STARTING_S; a rank without a stack for WITHOUT_STACK_S,
    after which it is assumed to run no Python."""
    if running_s >= STARTING_S:
        return False
    shown = [stacks.get(rank, ()) for rank in inspectable_ranks(stall)]
    texts = (IMPORTING, *starting)
    return any(
        any(text in line for line in lines for text in texts) if lines else running_s < WITHOUT_STACK_S
        for lines in shown
    )


def _stalled(stall: Stall) -> str:
    awaited = stall.awaited
    idle = [one for one in stall.rank_states if one not in awaited and not one.finished]
    one_awaited = len(awaited) == 1
    doing = "computes" if one_awaited else "compute"
    if awaited[0].finished:
        doing = f"{'has' if one_awaited else 'have'} exited with status 0"
    elif awaited[0].activity.stopped_s:
        doing = f"{'is' if one_awaited else 'are'} stopped"
    others, have = first_named([f"rank {one.rank}" for one in idle]), "has" if len(idle) == 1 else "have"
    names, seconds = first_named([one.place for one in awaited]), min(one.activity.idle_s for one in idle)
    return f"{others} {have} waited {seconds:.0f} s for {names}, which {doing}"


def _place(lines: Sequence[str]) -> str | None:
    """Return the innermost frame outside Python's standard library."""
    return next((line for line in lines if not OF_PYTHON.search(line)), None)


def describe_failure(cause: RankExit, rank_states: Sequence[RankState], stall: Stall | None, stacks: Stacks) -> str:
    """Describe a failed job in one line, followed by the last lines of output. If the failed rank had waited for a rank
    that is stopped, or there was a `stall` just before, that comes first. `stacks` are the stacks of its ranks."""
    stopped = [one for one in rank_states if one.exit is None and one.activity.stopped_s]
    if stopped and cause.by_itself:
        return f"{describe_stopped(stopped[0])}\nthen {describe_exit(cause)}"
    if stall is not None and cause.by_itself and cause.rank not in [one.rank for one in stall.awaited]:
        listed = "".join(
            f"\n  Python stack of rank {rank}, innermost first:" + "".join(f"\n  | {line}" for line in lines)
            for rank, lines in sorted(stacks.items())
            if lines
        )
        return f"{_stalled(stall)}{listed}\nthen {describe_exit(cause)}"
    if finished := finished_before(cause, rank_states):
        names = first_named([one.place for one in finished])
        others = plural(sum(not one.finished for one in rank_states), "other")
        return f"{names} exited with status 0 while {others} still ran; then {describe_exit(cause)}"
    return describe_exit(cause)


class StallWatch:
    """Record which ranks the others wait for, and report each case once, after longer waits each time. Slow starts are
    not reported, and their stacks are requested less and less often. `starting` are texts in the stack of a rank that
    has not started yet."""

    def __init__(self, starting: Sequence[str] = ()) -> None:
        self._starting = starting
        self._begun: float | None = None
        self._last: tuple[float, Stall] | None = None
        self._waiting_s = WAITING_S
        self._reported: tuple[int, ...] = ()
        self._ask_at = 0.0
        self._pause_s = ASK_AGAIN_S

    def take(self, rank_states: tuple[RankState, ...], now: float, stacks_of: Callable[[Stall], Stacks]) -> str | None:
        """Take a reading of all ranks; return the line about a stall if it is to be reported now."""
        self._begun = now if self._begun is None else self._begun
        awaited = awaited_ranks(rank_states)
        if not awaited:
            self._reported = ()
            return None
        stall, ranks = Stall(awaited=awaited, rank_states=rank_states), tuple(one.rank for one in awaited)
        self._last = now, stall
        running_s = now - self._begun
        if ranks == self._reported or not awaited_ranks(rank_states, self._waiting_s):
            return None
        if now < self._ask_at and running_s < STARTING_S:
            return None
        stacks = stacks_of(stall)
        if is_starting(stall, stacks, running_s, self._starting):
            self._ask_at, self._pause_s = now + self._pause_s, 2 * self._pause_s
            return None
        self._reported, self._waiting_s = ranks, 2 * self._waiting_s
        return describe_stall(stall, stacks)

    def check(self, rank_states: tuple[RankState, ...], now: float, stacks_of: Callable[[Stall], Stacks]) -> None:
        """Log which rank keeps the others waiting. Raises JobFailedError if one is stopped."""
        if stopped := stopped_rank(rank_states):
            raise JobFailedError(describe_stopped(stopped))
        if message := self.take(rank_states, now, stacks_of):
            logger.warning("cputrain: %s", message)

    def before(self, now: float) -> Stall | None:
        """Return the stall that lasted until just now, if any: ranks that time out compute until they have exited."""
        return self._last[1] if self._last is not None and now - self._last[0] <= AFTERWARDS_S else None


SILENCE_CHECK_S = 0.25  # between two checks for silent ranks
ALONE_S = 10.0  # a scheduler that ends a job signals the agents of all hosts within this time
STACK_S, STACK_POLL_S = 1.5, 0.1  # for the agents' answers
GATHER_S = 1e-5  # per rank, so that reports of many ranks are processed together


@dataclass(slots=True, kw_only=True)
class ReportedRank:
    """What the monitor knows of a rank from its agent. `heartbeat` is when its last message arrived by the monitor's
    clock, `answered` when a message was last answered. With `by_job` the job ended it. `stack` is the last requested
    Python stack. `signal` is the stop signal that its agent received (0: none), `signaled` when."""

    state: RankState
    heartbeat: float
    answered: float
    by_job: bool = False
    stack: tuple[str, ...] | None = None
    signal: int = 0
    signaled: float = 0.0


class Monitor:
    """Receive the reports of the agents of a job's ranks.

    `hosts` are the hosts of the ranks in order, `address` is this host's address for them. `timeout_s` is how long a
    rank may be silent, not counting pauses of this process.
    """

    def __init__(
        self, token: str, hosts: tuple[str, ...], address: str = LOOPBACK, timeout_s: float = HEARTBEAT_TIMEOUT_S
    ) -> None:
        self.token = token
        self.ranks: dict[int, ReportedRank] = {}
        self.clock = RunningClock()
        self._timeout_s = timeout_s
        self._failed: list[ReportedRank] = []
        self._alone: list[ReportedRank] = []  # the failed ranks whose only fault is that their agents were stopped
        self._checked_at = self.clock.now() - SILENCE_CHECK_S
        self._preempts = False
        self._hosts, self._size = hosts, len(hosts)
        self._labels = _labels(tuple(dict.fromkeys(hosts)))
        self._exits = 0
        self._ended = 0  # exits and lost agents that `failed` has taken into account
        self._server = RankServer(token, hosts, address, (Activity, Exit, Stack, Signaled))

    @property
    def port(self) -> int:
        """The port where it listens."""
        return self._server.port

    def poll(self, timeout_s: float) -> None:
        """Process and answer the reports that have arrived; wait up to timeout_s for the first one."""
        self.clock.now()
        if self._preempts and len(self.ranks) == self._size:
            self._preempts = False
            self._server.send_all(Preempt())
        time.sleep(GATHER_S * len(self.ranks))
        for rank, message in self._server.poll(timeout_s):
            self._take(rank, message)

    def _take(self, rank: int, message: Any) -> None:
        now = self.clock.now()
        if isinstance(message, Hello):
            self.ranks[rank] = ReportedRank(state=RankState(rank=rank, host=message.host), heartbeat=now, answered=now)
            label = self._labels[self._hosts[rank]] or message.host.partition(".")[0]
            self._server.connections[rank].send(Answer(label=label))
            return
        reported = self.ranks[rank]
        reported.heartbeat = now
        if isinstance(message, Activity):
            if now - reported.answered >= ANSWER_S:
                reported.answered = now
                self._server.connections[rank].send(Answer())
            reported.state = replace(reported.state, activity=message)
        elif isinstance(message, Stack):
            reported.stack = message.lines
        elif isinstance(message, Signaled):
            reported.signal, reported.signaled = message.number, now
        elif reported.state.exit is not None or message.status not in STATUSES:
            self._server.drop(rank)
        else:
            reported.by_job = message.by_job
            reported.state = replace(reported.state, exit=_exit(rank, reported.state.host, message, now))
            self._exits += 1

    def failed(self) -> list[ReportedRank]:
        """Return the ranks that failed by themselves, are silent, or whose agents are gone or were stopped alone.

        Evaluated when a rank has exited or lost its agent, otherwise every SILENCE_CHECK_S.
        """
        now, ended = self.clock.now(), self._exits + len(self._server.lost)
        if ended != self._ended or now - self._checked_at >= SILENCE_CHECK_S:
            self._checked_at, self._ended, oldest = now, ended, now - self._timeout_s
            failed = [one for one in self.ranks.values() if self._has_failed(one, oldest)]
            self._alone = [] if failed else self._stopped_alone(now - ALONE_S)
            self._failed = failed or self._alone
        return self._failed

    def _has_failed(self, one: ReportedRank, oldest: float) -> bool:
        """Return whether the rank has failed; heartbeats before the time `oldest` are too old."""
        if one.state.exit is not None:
            return one.state.exit.status != 0 and not one.by_job
        return one.heartbeat < oldest or one.state.rank in self._server.lost

    def _stopped_alone(self, latest: float) -> list[ReportedRank]:
        """Return the ranks whose agents a signal stopped before `latest` while others run without having received one:
        then nobody is ending the job, and the others may wait for these ranks."""
        signaled = [one for one in self.ranks.values() if one.signal and one.signaled < latest]
        ends = not signaled or all(one.signal or one.state.exit is not None for one in self.ranks.values())
        return [] if ends else signaled

    def rank_states(self) -> tuple[RankState, ...]:
        """Return what the ranks are doing, or were doing when they exited."""
        return tuple(one.state for one in self.ranks.values())

    def cause(self, stall: Stall | None = None, stacks: Stacks = MappingProxyType({})) -> str:
        """Describe the failure that caused the others in one line, followed by the last lines of output. `stall` is the
        stall just before it, `stacks` are the stacks of its ranks."""
        if self.failed() and self._alone:
            alone = min(self._alone, key=lambda one: (one.signaled, one.state.rank))
            end = "" if alone.state.exit is None else f"; {describe_exit(alone.state.exit)}"
            stopped = f"the agent of {alone.state.place} was stopped by {signal_name(alone.signal)}"
            return f"{stopped}, while other ranks kept running{end}"
        if exits := [one.state.exit for one in self.failed() if one.state.exit is not None]:
            return describe_failure(first_cause(exits), self.rank_states(), stall, stacks)
        lost = self._server.lost
        first = min(self.failed(), key=lambda one: (one.state.rank not in lost, one.heartbeat, one.state.rank))
        if first.state.rank in lost:
            return f"{first.state.place} has lost its agent, which was killed or cut off: see its host's log"
        return f"{first.state.place} has been silent for {self._timeout_s:g} s: its host is down, cut off or overloaded"

    def stacks(self, ranks: Sequence[int]) -> Stacks:
        """Return the Python stacks of the running ranks among these: answers within STACK_S, else earlier stacks."""
        running = {rank: one for rank in ranks if (one := self.ranks[rank]).state.exit is None}
        before = {rank: one.stack for rank, one in running.items()}
        for rank, one in running.items():
            one.stack = None
            self._server.connections[rank].send(ShowStack())
        deadline = time.monotonic() + STACK_S
        while any(one.stack is None for one in running.values()) and time.monotonic() < deadline:
            self.poll(STACK_POLL_S)
        return {rank: one.stack or before[rank] or () for rank, one in running.items()}

    def stop(self, grace_s: float) -> None:
        """Tell every agent to end its rank, which gets grace_s to exit by itself."""
        self._server.send_all(Stop(grace_s=grace_s))

    def preempt(self) -> None:
        """Make the next `poll` that finds all agents connected tell them to send their ranks the preemption signal.
        Safe in a signal handler, which may have interrupted another message."""
        self._preempts = True

    def close(self) -> None:
        """Close every connection; agents that are left then end their ranks immediately."""
        self._server.close()


def _labels(hosts: tuple[str, ...]) -> dict[str, str]:
    """Return each host's label; "" for localhost, which does not name the host."""
    return {host: "" if is_loopback(host) else label for host, label in zip(hosts, host_labels(hosts), strict=True)}


def _exit(rank: int, host: str, message: Exit, now: float) -> RankExit:
    used = message.shortage
    shortage = OutOfMemory(used_bytes=used[0], limit_bytes=used[1], whole=used[2]) if used else None
    tail = message.tail[-LAST_LINES:]
    return RankExit(
        rank=rank, host=host, status=message.status, time=now, log=message.log, tail=tail, shortage=shortage
    )
