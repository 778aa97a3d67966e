"""The job's signs of life: which rank is where, which has ended, which is silent. Lives where the job was launched."""

import resource
import selectors
import socket
import time
from dataclasses import dataclass, field

from mpi.supervise.connection import SILENT_S, Line
from mpi.supervise.exits import End, first_cause, obituary


@dataclass(slots=True, kw_only=True)
class Seen:
    """A rank as its agent tells of it. `status` is None while it runs; negative where a signal ended it."""

    rank: int
    host: str
    line: Line
    heard: float
    stopped_since: float | None = None
    status: int | None = None
    ended: float = 0.0
    by_job: bool = False
    tail: tuple[str, ...] = ()
    log: str = ""


@dataclass(slots=True)
class Monitor:
    """Listens to the agents of a job's ranks."""

    token: str
    ranks: dict[int, Seen] = field(default_factory=dict)
    _speakers: dict[Line, Seen] = field(default_factory=dict)
    _server: socket.socket = field(default_factory=lambda: socket.create_server(("", 0), backlog=4096))
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __post_init__(self) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each rank
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ, None)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.getsockname()[1])

    def poll(self, timeout_s: float) -> None:
        """Take what has arrived, answering every beat; waits that long for the first."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                connection, _ = self._server.accept()
                line = Line(connection)
                self._selector.register(connection, selectors.EVENT_READ, line)
            else:
                self._listen(key.data)

    def _listen(self, line: Line) -> None:
        messages = line.receive()
        if messages is None:
            self._selector.unregister(line.connection)
            line.close()
            return
        now = time.monotonic()
        for message in messages:
            if message.get("what") == "hello" and message.get("token") == self.token:
                seen = Seen(rank=int(message["rank"]), host=str(message["host"]), line=line, heard=now)
                self.ranks[seen.rank] = self._speakers[line] = seen
                continue
            speaker = self._speakers.get(line)
            if speaker is None:
                continue  # no agent of this job
            speaker.heard = now
            if message.get("what") == "beat":
                line.send(what="beat")
                stopped = bool(message.get("stopped"))
                speaker.stopped_since = (speaker.stopped_since or now) if stopped else None
            elif message.get("what") == "end":
                speaker.status, speaker.ended = int(message["status"]), now
                speaker.by_job = bool(message.get("by_job"))
                speaker.tail, speaker.log = tuple(map(str, message.get("tail", ()))), str(message.get("log", ""))

    def failed(self) -> list[Seen]:
        """The ranks that have ended badly by themselves, are stopped or silent."""
        now = time.monotonic()
        return [
            seen
            for seen in self.ranks.values()
            if (seen.status not in (None, 0) and not seen.by_job)
            or (seen.status is None and now - seen.heard > SILENT_S)
            or (seen.status is None and seen.stopped_since is not None and now - seen.stopped_since > SILENT_S)
        ]

    def stop(self) -> None:
        """Tell every agent to end its rank."""
        for seen in self.ranks.values():
            seen.line.send(what="stop")

    def give_notice(self) -> None:
        """Tell every agent to pass SIGUSR1 on to its rank."""
        for seen in self.ranks.values():
            seen.line.send(what="notice")

    def close(self) -> None:
        """Hang up on everybody: an agent that is left ends its rank then."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.close()
        self._selector.close()
        self._server.close()


def cause_of(failed: list[Seen]) -> str:
    """What became of the rank that the others followed, in one line and its last lines."""
    ends = [
        End(rank=seen.rank, host=seen.host, status=seen.status, at=seen.ended, log=seen.log, tail=seen.tail)
        for seen in failed
        if seen.status is not None
    ]
    if ends:
        return obituary(first_cause(ends))
    first = min(failed, key=lambda seen: (seen.heard, seen.rank))
    who = f"rank {first.rank} on {first.host}"
    if first.stopped_since is not None:
        return f"{who} has been stopped for {SILENT_S:g} s: look who sent it SIGSTOP"
    return f"{who} has been silent for {SILENT_S:g} s: its host is down, cut off or overloaded"
