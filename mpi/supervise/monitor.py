"""The job's monitor, on the host that launched it: where each rank runs, its heartbeat, what it does, its exit."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from affinity.ranks.host_names import host_labels, is_loopback
from affinity.ranks.rank import LOOPBACK
from mpi.supervise.activity import Activity
from mpi.supervise.clock import RunningClock
from mpi.supervise.connection import ANSWER_S, HEARTBEAT_TIMEOUT_S
from mpi.supervise.exits import LAST_LINES, STATUSES, RankExit, describe_exit, first_cause, signal_name
from mpi.supervise.memory import Shortage
from mpi.supervise.messages import Answer, Exit, Heartbeat, Hello, Preempt, ShowStack, Signaled, Stack, Stop
from mpi.supervise.server import RankServer
from mpi.supervise.signals import undivided
from mpi.supervise.stalls import Stacks, Stall, Standing, describe_failure

SILENCE_CHECK_S = 0.25  # between two looks for silent ranks
ALONE_S = 10.0  # a scheduler that ends a job signals the agents of all hosts within this time
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

    @undivided()
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

    def first_exit(self) -> RankExit | None:
        """The failed rank's exit from which the others followed; None where ranks are only silent."""
        exits = [status.exit for status in self.failed() if status.exit is not None]
        return first_cause(exits) if exits else None

    def cause(self, stall: Stall | None = None, stacks: Stacks = MappingProxyType({})) -> str:
        """The failure that the others followed from, in one line and the last lines of output. `stall` is the one just
        before it, `stacks` are those of its ranks."""
        if self.failed() and self._alone:
            alone = min(self._alone, key=lambda one: (one.signaled, one.rank))
            end = "" if alone.exit is None else f"; {describe_exit(alone.exit)}"
            stopped = f"the agent of rank {alone.rank} on {alone.host} was stopped by {signal_name(alone.signal)}"
            return f"{stopped}, while other ranks ran on{end}"
        if (cause := self.first_exit()) is not None:
            return describe_failure(cause, self.standings(), stall, stacks)
        lost = self._server.lost
        first = min(self.failed(), key=lambda one: (one.rank not in lost, one.heartbeat, one.rank))
        rank = f"rank {first.rank} on {first.host}"
        if first.rank in lost:
            return f"{rank} has lost its agent, which was killed or cut off: see its host's log"
        return f"{rank} has been silent for {self._timeout_s:g} s: its host is down, cut off or overloaded"

    @undivided()
    def show_stacks(self, ranks: Iterable[int]) -> None:
        """Ask these ranks, which run, for their Python stacks."""
        for rank in ranks:
            self.ranks[rank].stack = None
            self._server.connections[rank].send(ShowStack())

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
