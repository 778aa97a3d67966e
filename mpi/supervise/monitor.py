"""What the ranks of a job report through their agents: which failed first, which hosts are silent."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from cputrain.affinity.host_names import host_labels, is_loopback
from cputrain.affinity.rank import LOOPBACK
from cputrain.mpi.supervise.processes import (
    LAST_LINES,
    STACK_ANSWER_S,
    STATUSES,
    OutOfMemory,
    RankExit,
    describe_exit,
    first_cause,
    signal_name,
)
from cputrain.mpi.supervise.signals import RunningClock
from cputrain.mpi.supervise.stalls import RankState, Stacks, Stall, describe_failure, is_where_it_was
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

SILENCE_CHECK_S = 0.25  # between two checks for silent ranks
ALONE_S = 10.0  # a scheduler that ends a job signals the agents of all hosts within this time
STACK_S, STACK_POLL_S = STACK_ANSWER_S + 0.5, 0.1  # for the agents
GATHER_S = 1e-5  # per rank, so that reports of many ranks are processed together


@dataclass(slots=True, kw_only=True)
class ReportedRank:
    """What the monitor knows of a rank from its agent. `heartbeat` is when its last message arrived by the monitor's
    clock, `answered` when a message was last answered. With `by_job` the job ended it. `stack` is the last requested
    Python stack, `stacked_at` when it arrived. `signal` is the stop signal that its agent received (0: none),
    `signaled` when."""

    state: RankState
    heartbeat: float
    answered: float
    by_job: bool = False
    stack: tuple[str, ...] | None = None
    stacked_at: float = 0.0
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
            reported.stack, reported.stacked_at = message.lines, now
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
            failed = [rank for rank in self.ranks.values() if self._has_failed(rank, oldest)]
            self._alone = [] if failed else self._stopped_alone(now - ALONE_S)
            self._failed = failed or self._alone
        return self._failed

    def _has_failed(self, rank: ReportedRank, oldest: float) -> bool:
        """Return whether the rank has failed; heartbeats before the time `oldest` are too old."""
        if rank.state.exit is not None:
            return rank.state.exit.status != 0 and not rank.by_job
        return rank.heartbeat < oldest or rank.state.rank in self._server.lost

    def _stopped_alone(self, latest: float) -> list[ReportedRank]:
        """Return the ranks whose agents a signal stopped before `latest` while others run without having received one:
        then nobody is ending the job, and the others may wait for these ranks."""
        signaled = [rank for rank in self.ranks.values() if rank.signal and rank.signaled < latest]
        ends = not signaled or all(rank.signal or rank.state.exit is not None for rank in self.ranks.values())
        return [] if ends else signaled

    def rank_states(self) -> tuple[RankState, ...]:
        """Return what the ranks are doing, or were doing when they exited."""
        return tuple(self.ranks[rank].state for rank in sorted(self.ranks))

    def cause(self, stall: Stall | None = None, stacks: Stacks = MappingProxyType({})) -> str:
        """Describe the failure that caused the others in one line, followed by the last lines of output. `stall` is the
        stall just before it, `stacks` are the stacks of its ranks."""
        if self.failed() and self._alone:
            alone = min(self._alone, key=lambda rank: (rank.signaled, rank.state.rank))
            end = "" if alone.state.exit is None else f"; {describe_exit(alone.state.exit)}"
            stopped = f"the agent of {alone.state.place} was stopped by {signal_name(alone.signal)}"
            return f"{stopped}, while other ranks kept running{end}"
        if exits := [rank.state.exit for rank in self.failed() if rank.state.exit is not None]:
            return describe_failure(first_cause(exits), self.rank_states(), stall, stacks)
        lost = self._server.lost
        first = min(self.failed(), key=lambda rank: (rank.state.rank not in lost, rank.heartbeat, rank.state.rank))
        if first.state.rank in lost:
            return f"{first.state.place} has lost its agent, which was killed or cut off: see its host's log"
        return f"{first.state.place} has been silent for {self._timeout_s:g} s: its host is down, cut off or overloaded"

    def stacks(self, ranks: Sequence[int]) -> Stacks:
        """Return the Python stacks of the running ranks among these: answers within STACK_S, else earlier stacks
        of ranks that are where they were."""
        running = {rank: reported for rank in ranks if (reported := self.ranks[rank]).state.exit is None}
        now = self.clock.now()
        before = {
            rank: reported.stack
            for rank, reported in running.items()
            if is_where_it_was(reported.state.activity, now - reported.stacked_at)
        }
        for rank, reported in running.items():
            reported.stack = None
            self._server.connections[rank].send(ShowStack())
        deadline = time.monotonic() + STACK_S
        while any(reported.stack is None for reported in running.values()) and time.monotonic() < deadline:
            self.poll(STACK_POLL_S)
        return {rank: reported.stack or before.get(rank) or () for rank, reported in running.items()}

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
