"""What the ranks of a job do: who waits for whom, who has failed first, which host is silent.

The time for which a process waits for a core counts as computing: a shared host may give it little of one.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cputrain.affinity.filesystem import read_stat
from cputrain.affinity.ranks.host_names import host_labels, is_loopback
from cputrain.affinity.ranks.rank import LOOPBACK
from cputrain.affinity.wording import counted, first_named
from cputrain.mpi.supervise.processes import (
    LAST_LINES,
    STATUSES,
    JobFailedError,
    RankExit,
    Shortage,
    describe_exit,
    first_cause,
    signal_name,
)
from cputrain.mpi.supervise.signals import RunningClock
from cputrain.mpi.supervise.wire import (
    ANSWER_S,
    HEARTBEAT_TIMEOUT_S,
    Answer,
    Exit,
    Heartbeat,
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
IDLE_CORES = 0.05  # a rank that wants less waits for something; heartbeats and progress bars take some
BUSY_CORES = 0.5  # a rank that wants more computes
STOPPED = "T"  # by a signal, not by a debugger, in which somebody looks at it: proc(5), /proc/PID/stat
NANOSECOND_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """For how many seconds, up to its last reading, a rank has been stopped, idle or busy without a break."""

    stopped_s: float = 0.0
    idle_s: float = 0.0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTime:
    """The CPU seconds that a process, or several, have had, with those of ended children, and for which their main
    threads have waited; whether one of them is stopped."""

    wanted_s: float
    stopped: bool


class ActivityMeter:
    """Follows the rank whose first process is `pid`. The times are those of one clock, in seconds.

    What that process has started is looked at only while it is idle itself: one that waits for a child, as a shell
    does, is as busy as the child.
    """

    def __init__(self, pid: int, now: float) -> None:
        self._pid = pid
        self._at = self._idle_since = self._busy_since = now
        self._stopped_since: float | None = None
        self._root = read_process(pid)
        self._below: ProcessTime | None = None
        self.activity = Activity()

    def read(self, now: float) -> None:
        """Take a reading where one is due; a process that has ended keeps its last one."""
        if now - self._at < READ_S or (root := read_process(self._pid)) is None:
            return
        seconds = now - self._at
        wanted = root.wanted_s - self._root.wanted_s if self._root else 0.0
        below = read_below(self._pid) if wanted < IDLE_CORES * seconds else None
        if below is not None and self._below is not None:
            wanted += max(0.0, below.wanted_s - self._below.wanted_s)
            idle, busy = wanted < IDLE_CORES * seconds, wanted >= BUSY_CORES * seconds
        else:  # of the children nothing is known yet
            idle, busy = False, below is None and wanted >= BUSY_CORES * seconds
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
    """A process's time; None where it has ended."""
    try:
        stat = read_stat(pid)
    except OSError:
        return None
    if stat.state in "ZX":
        return None
    waited_s = 0.0
    with suppress(OSError, IndexError):  # a kernel without these statistics
        waited_s = int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[1]) * NANOSECOND_S
    return ProcessTime(wanted_s=stat.cpu_s + waited_s, stopped=stat.state == STOPPED)


def tree(pid: int) -> list[int]:
    """A process and all below it, parents before their children."""
    found = [pid]
    for one in found:
        with suppress(OSError):  # has ended meanwhile
            found += children_of(one)
    return found


def read_below(pid: int) -> ProcessTime:
    """The time of all processes below this one together."""
    read = [one for child in tree(pid)[1:] if (one := read_process(child))]
    return ProcessTime(wanted_s=sum(one.wanted_s for one in read), stopped=any(one.stopped for one in read))


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
    return tuple(left) if cause.by_itself and len(left) <= sum(not one.left for one in standings) else ()


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
    if stopped and cause.by_itself:
        return f"{describe_stopped(stopped[0])}\nthen {describe_exit(cause)}"
    if stall is not None and cause.by_itself and cause.rank not in [one.rank for one in stall.awaited]:
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


SILENCE_CHECK_S = 0.25  # between two looks for silent ranks
ALONE_S = 10.0  # a scheduler that ends a job signals the agents of all hosts within this time
STACK_S, STACK_POLL_S = 1.5, 0.1  # for the agents' answers
GATHER_S = 1e-5  # for each rank: the reports of many ranks are taken together


@dataclass(slots=True, kw_only=True)
class RankStatus:
    """A rank as its agent reports it. `heartbeat` is the time of its last message by the monitor's clock, `answered`
    that of the last one that was answered. `exit` is None while it runs; with `by_job` the job has ended it. `stack`:
    the Python stack that was requested last. `signal`, `signaled`: the stop signal that its agent has got (0: none),
    and when."""

    rank: int
    host: str
    heartbeat: float
    answered: float
    activity: Activity
    exit: RankExit | None = None
    by_job: bool = False
    stack: tuple[str, ...] | None = None
    signal: int = 0
    signaled: float = 0.0

    @property
    def succeeded(self) -> bool:
        """Whether the rank has exited with status 0."""
        return self.exit is not None and self.exit.status == 0


class Monitor:
    """Takes the reports of the agents of a job's ranks.

    `hosts` are those of the ranks, `address` that of this host by which they reach it. `timeout_s` is how long a rank
    may be silent; pauses of this process do not count.
    """

    def __init__(
        self, token: str, hosts: tuple[str, ...], address: str = LOOPBACK, timeout_s: float = HEARTBEAT_TIMEOUT_S
    ) -> None:
        self.token = token
        self.ranks: dict[int, RankStatus] = {}
        self.clock = RunningClock()
        self._timeout_s = timeout_s
        self._failed: list[RankStatus] = []
        self._alone: list[RankStatus] = []  # of the failed ones, those that failed by nothing else
        self._checked_at = self.clock.now() - SILENCE_CHECK_S
        self._preempts = False
        self._hosts, self._size = hosts, len(hosts)
        self._labels = _labels(tuple(dict.fromkeys(hosts)))
        self._exits = 0
        self._ended = 0  # of the exits and lost agents, those of which `failed` knows
        self._server = RankServer(token, hosts, address, (Heartbeat, Exit, Stack, Signaled))

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    def poll(self, timeout_s: float) -> None:
        """Take the reports that have arrived, answering them; waits that long for the first one."""
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
            status = RankStatus(rank=rank, host=message.host, heartbeat=now, activity=Activity(), answered=now)
            self.ranks[rank] = status
            label = self._labels[self._hosts[rank]] or message.host.partition(".")[0]
            self._server.connections[rank].send(Answer(label=label))
            return
        status = self.ranks[rank]
        status.heartbeat = now
        if isinstance(message, Heartbeat):
            if now - status.answered >= ANSWER_S:
                status.answered = now
                self._server.connections[rank].send(Answer())
            status.activity = Activity(stopped_s=message.stopped_s, idle_s=message.idle_s, busy_s=message.busy_s)
        elif isinstance(message, Stack):
            status.stack = message.lines
        elif isinstance(message, Signaled):
            status.signal, status.signaled = message.number, now
        elif status.exit is not None or message.status not in STATUSES:
            self._server.drop(rank)
        else:
            status.by_job = message.by_job
            status.exit = _exit(rank, status.host, message, now)
            self._exits += 1

    def failed(self) -> list[RankStatus]:
        """The ranks that have failed by themselves, are silent, or whose agents are gone or were stopped alone.

        Judged when one has exited or lost its agent, otherwise every SILENCE_CHECK_S: only silence takes time then.
        """
        now, ended = self.clock.now(), self._exits + len(self._server.lost)
        if ended != self._ended or now - self._checked_at >= SILENCE_CHECK_S:
            self._checked_at, self._ended, oldest = now, ended, now - self._timeout_s
            failed = [status for status in self.ranks.values() if self._has_failed(status, oldest)]
            self._alone = [] if failed else self._stopped_alone(now - ALONE_S)
            self._failed = failed or self._alone
        return self._failed

    def _has_failed(self, status: RankStatus, oldest: float) -> bool:
        """`oldest` is the time of the oldest heartbeat that still counts."""
        if status.exit is not None:
            return status.exit.status != 0 and not status.by_job
        return status.heartbeat < oldest or status.rank in self._server.lost

    def _stopped_alone(self, latest: float) -> list[RankStatus]:
        """The ranks whose agents a signal has stopped before `latest`, where others run and no signal has reached them:
        nobody ends this job, and the others may wait for these ranks."""
        signaled = [one for one in self.ranks.values() if one.signal and one.signaled < latest]
        ends = not signaled or all(one.signal or one.exit is not None for one in self.ranks.values())
        return [] if ends else signaled

    def standings(self) -> tuple[Standing, ...]:
        """What the ranks do, or did when they exited."""
        return tuple(
            Standing(rank=one.rank, host=one.host, activity=one.activity, exit=one.exit) for one in self.ranks.values()
        )

    def cause(self, stall: Stall | None = None, stacks: Stacks = MappingProxyType({})) -> str:
        """The failure that the others followed from, in one line and the last lines of output. `stall` is the one just
        before it, `stacks` are those of its ranks."""
        if self.failed() and self._alone:
            alone = min(self._alone, key=lambda one: (one.signaled, one.rank))
            end = "" if alone.exit is None else f"; {describe_exit(alone.exit)}"
            stopped = f"the agent of rank {alone.rank} on {alone.host} was stopped by {signal_name(alone.signal)}"
            return f"{stopped}, while other ranks ran on{end}"
        if exits := [status.exit for status in self.failed() if status.exit is not None]:
            return describe_failure(first_cause(exits), self.standings(), stall, stacks)
        lost = self._server.lost
        first = min(self.failed(), key=lambda one: (one.rank not in lost, one.heartbeat, one.rank))
        rank = f"rank {first.rank} on {first.host}"
        if first.rank in lost:
            return f"{rank} has lost its agent, which was killed or cut off: see its host's log"
        return f"{rank} has been silent for {self._timeout_s:g} s: its host is down, cut off or overloaded"

    def stacks(self, ranks: Sequence[int]) -> Stacks:
        """The Python stacks of those of these ranks that run, as their agents answer within STACK_S, or else before."""
        running = {rank: status for rank in ranks if (status := self.ranks[rank]).exit is None}
        before = {rank: status.stack for rank, status in running.items()}
        for rank, status in running.items():
            status.stack = None
            self._server.connections[rank].send(ShowStack())
        deadline = time.monotonic() + STACK_S
        while any(status.stack is None for status in running.values()) and time.monotonic() < deadline:
            self.poll(STACK_POLL_S)
        return {rank: status.stack or before[rank] or () for rank, status in running.items()}

    def stop(self, grace_s: float) -> None:
        """Make every agent end its rank, which has so many seconds to end by itself."""
        self._server.send_all(Stop(grace_s=grace_s))

    def preempt(self) -> None:
        """Make every agent send its rank the preemption signal, at the first `poll` that finds all of them connected. A
        signal's handler, which may have interrupted another message, can call this."""
        self._preempts = True

    def close(self) -> None:
        """Close every connection: an agent that is left ends its rank then, at once."""
        self._server.close()


def _labels(hosts: tuple[str, ...]) -> dict[str, str]:
    """Each host's label; "" where the job does not name it, but says localhost."""
    return {host: "" if is_loopback(host) else label for host, label in zip(hosts, host_labels(hosts), strict=True)}


def _exit(rank: int, host: str, message: Exit, now: float) -> RankExit:
    used = message.shortage
    shortage = Shortage(used_bytes=used[0], limit_bytes=used[1], whole=used[2]) if used else None
    tail = message.tail[-LAST_LINES:]
    return RankExit(
        rank=rank, host=host, status=message.status, time=now, log=message.log, tail=tail, shortage=shortage
    )
