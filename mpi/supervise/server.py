"""The server that a job's ranks, or its hosts before it starts, report to; on the host that launched the job."""

import logging
import resource
import selectors
import socket
import time
from typing import Any

from mpi.supervise.connection import Connection
from mpi.supervise.messages import Hello, ProtocolError, Stop

BACKLOG = 4096
ACCEPTED_AT_ONCE = 256
HELLO_TIMEOUT_S = 10.0  # a connection without a signed Hello is closed
SPARE_CONNECTIONS = 64  # without Hello, beyond one for each rank; the oldest makes room for a new one, once it is read
OWN_FILES = 64  # that this process needs for other purposes
logger = logging.getLogger(__name__)


class RankServer:
    """Accepts connections and takes messages from those that have said Hello, signed by the job's token.

    `hosts` are the ranks' hosts, `address` that of this host by which they reach it, `accepts` the types of their
    messages. A connection that sends anything else is closed, and nothing else happens; one whose signed Hello does not
    fit the job is told to stop.
    """

    def __init__(self, token: str, hosts: tuple[str, ...], address: str, accepts: tuple[type, ...]) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each rank
        self.token = token
        self.connections: dict[int, Connection] = {}
        self.lost: set[int] = set()  # ranks whose connections have been closed
        self._hosts = hosts
        self._accepts = (Hello, *accepts)
        room = len(hosts) + SPARE_CONNECTIONS
        self._max_waiting = room if most == resource.RLIM_INFINITY else max(1, min(room, most - len(hosts) - OWN_FILES))
        self._waiting: dict[Connection, float] = {}  # without Hello, oldest first, with their deadlines
        self._ranks: dict[Connection, int] = {}
        self._names: dict[str, str] = {}  # of hosts, as their ranks give them
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.getsockname()[1])

    def poll(self, timeout_s: float) -> list[tuple[int, Any]]:
        """The messages that have arrived, each with its rank, Hello among them; waits that long for the first one."""
        received: list[tuple[int, Any]] = []
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                # Many, as all ranks of a job connect at the same time; not all, or strangers could keep it here.
                all(self._accept(received) for _ in range(ACCEPTED_AT_ONCE))
            elif key.data in self._waiting or key.data in self._ranks:  # not closed meanwhile
                received += self._receive(key.data)
        now = time.monotonic()
        for connection in [one for one, deadline in self._waiting.items() if deadline < now]:
            self._close(connection)
        return received

    def _accept(self, received: list[tuple[int, Any]]) -> bool:
        """Accept a connection; False where none was. Adds what is read to make room for it to `received`."""
        try:
            accepted, _ = self._server.accept()
        except BlockingIOError:
            return False
        except OSError:  # the other end is gone, or there is no file descriptor left
            received += self._make_room()
            return False
        if len(self._waiting) >= self._max_waiting:
            received += self._make_room()
        connection = Connection(accepted, self.token, self._accepts, None)
        self._waiting[connection] = time.monotonic() + HELLO_TIMEOUT_S
        self._selector.register(connection, selectors.EVENT_READ, connection)
        return True

    def _make_room(self) -> list[tuple[int, Any]]:
        """Read the oldest connection without Hello, and close it where it still has none; the messages."""
        oldest = next(iter(self._waiting), None)
        if oldest is None:
            return []
        messages = self._receive(oldest)
        if oldest in self._waiting:
            self._close(oldest)
        return messages

    def _receive(self, connection: Connection) -> list[tuple[int, Any]]:
        messages = connection.receive()
        if messages is None:
            self._close(connection)
            return []
        try:
            return [(self._sender(connection, message), message) for message in messages]
        except ProtocolError as error:  # signed by the token: the job's own
            logger.warning("cputrain: a rank's connection is closed: %s", error)
            connection.send(Stop(grace_s=0.0))
            self._close(connection)
            return []

    def _sender(self, connection: Connection, message: Any) -> int:
        """The rank of a message. Raises ProtocolError where it does not fit the job."""
        rank = self._ranks.get(connection)
        if rank is not None and not isinstance(message, Hello):
            return rank
        if rank is not None or not isinstance(message, Hello):
            raise ProtocolError("its first message is not Hello")
        self._check(message)
        del self._waiting[connection]
        self.connections[message.rank], self._ranks[connection] = connection, message.rank
        return message.rank

    def _check(self, hello: Hello) -> None:
        """Raise ProtocolError where rank and host do not fit the job: each rank connects once, the ranks of a host
        give it one name. That may be another one than the job's, which may use an alias or an address."""
        if not 0 <= hello.rank < len(self._hosts):
            raise ProtocolError(f"rank {hello.rank} on {hello.host} is not one of the job's {len(self._hosts):,} ranks")
        if hello.rank in self.connections:
            raise ProtocolError(f"rank {hello.rank} on {hello.host} has connected before")
        host = self._hosts[hello.rank]
        if self._names.setdefault(host, hello.host) != hello.host:
            raise ProtocolError(
                f"rank {hello.rank} is on {hello.host}, other ranks of {host} are on {self._names[host]}"
            )

    def drop(self, rank: int) -> None:
        """Close a rank's connection: it has sent values that no rank of this job has."""
        if (connection := self.connections[rank]) in self._ranks:
            logger.warning("cputrain: rank %d's connection is closed: it has sent a wrong exit", rank)
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        self._selector.unregister(connection)
        self._waiting.pop(connection, None)
        if (rank := self._ranks.pop(connection, None)) is not None:
            self.lost.add(rank)
        connection.close()

    def send_all(self, message: Any) -> None:
        """Send a message to every rank."""
        for rank in self.connections.keys() - self.lost:
            self.connections[rank].send(message)

    def close(self) -> None:
        """Close every connection: a rank's agent that is left ends its rank then."""
        for connection in (*self._waiting, *self._ranks):
            connection.close()
        self._selector.close()
        self._server.close()
