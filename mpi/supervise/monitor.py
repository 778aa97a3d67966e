"""The job's monitor, on the host that launched it: where each rank runs, its heartbeat, its exit."""

import time
from dataclasses import dataclass
from typing import Any

from affinity.ranks.rank import LOOPBACK
from mpi.supervise.connection import HEARTBEAT_TIMEOUT_S
from mpi.supervise.exits import LAST_LINES, STATUSES, RankExit, describe_exit, first_cause
from mpi.supervise.messages import Answer, Exit, Heartbeat, Hello, Preempt, Stop
from mpi.supervise.server import RankServer


@dataclass(slots=True, kw_only=True)
class RankStatus:
    """A rank as its agent reports it. `heartbeat` is the time of its last message (monotonic). `exit` is None while it
    runs; with `by_job` the job has ended it."""

    rank: int
    host: str
    heartbeat: float
    stopped_since: float | None = None
    exit: RankExit | None = None
    by_job: bool = False

    @property
    def succeeded(self) -> bool:
        """Whether the rank has exited with status 0."""
        return self.exit is not None and self.exit.status == 0


class Monitor:
    """Takes the reports of the agents of a job's ranks.

    `hosts` are those of the ranks, `address` that of this host by which they reach it. `timeout_s` is how long a rank
    may be silent or stopped.
    """

    def __init__(
        self, token: str, hosts: tuple[str, ...], address: str = LOOPBACK, timeout_s: float = HEARTBEAT_TIMEOUT_S
    ) -> None:
        self.token = token
        self.ranks: dict[int, RankStatus] = {}
        self._timeout_s = timeout_s
        self._server = RankServer(token, hosts, address, (Heartbeat, Exit))

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    def poll(self, timeout_s: float) -> None:
        """Take the reports that have arrived, answering every heartbeat; waits that long for the first one."""
        for rank, message in self._server.poll(timeout_s):
            self._take(rank, message)

    def _take(self, rank: int, message: Any) -> None:
        now = time.monotonic()
        if isinstance(message, Hello):
            self.ranks[rank] = RankStatus(rank=rank, host=message.host, heartbeat=now)
            return
        status = self.ranks[rank]
        if isinstance(message, Exit):
            if status.exit is not None or message.status not in STATUSES:
                self._server.drop(rank)
                return
            status.by_job = message.by_job
            tail = message.tail[-LAST_LINES:]
            status.exit = RankExit(
                rank=rank, host=status.host, status=message.status, time=now, log=message.log, tail=tail
            )
        elif isinstance(message, Heartbeat):
            self._server.connections[rank].send(Answer())
            status.stopped_since = (status.stopped_since or now) if message.stopped else None
        status.heartbeat = now

    def failed(self) -> list[RankStatus]:
        """The ranks that have failed by themselves, are stopped or silent."""
        return [status for status in self.ranks.values() if self._has_failed(status)]

    def _has_failed(self, status: RankStatus) -> bool:
        if status.exit is not None:
            return status.exit.status != 0 and not status.by_job
        oldest = time.monotonic() - self._timeout_s
        return status.heartbeat < oldest or (status.stopped_since is not None and status.stopped_since < oldest)

    def cause(self) -> str:
        """The failure that the others followed from, in one line and the rank's last lines of output."""
        failed = self.failed()
        exits = [status.exit for status in failed if status.exit is not None]
        if exits:
            return describe_exit(first_cause(exits))
        first = min(failed, key=lambda status: (status.heartbeat, status.rank))
        rank = f"rank {first.rank} on {first.host}"
        if first.stopped_since is not None:
            return f"{rank} has been stopped for {self._timeout_s:g} s: find the sender of its SIGSTOP"
        return f"{rank} has been silent for {self._timeout_s:g} s: its host is down, cut off or overloaded"

    def stop(self) -> None:
        """Make every agent end its rank."""
        self._server.send_all(Stop())

    def preempt(self) -> None:
        """Make every agent send its rank the preemption signal."""
        self._server.send_all(Preempt())

    def close(self) -> None:
        """Close every connection: an agent that is left ends its rank then."""
        self._server.close()
