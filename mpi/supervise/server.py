"""The server that a job's ranks, or its hosts before it starts, report to; on the host that launched the job."""

import resource
import selectors
import socket
from typing import Any

from mpi.supervise.connection import Connection

BACKLOG = 4096


class RankServer:
    """Accepts connections and takes messages from those that have said hello with the job's token."""

    def __init__(self, token: str) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each rank
        self.token = token
        self.connections: dict[int, Connection] = {}
        self._ranks: dict[Connection, int] = {}
        self._server = socket.create_server(("", 0), backlog=BACKLOG)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.getsockname()[1])

    def poll(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        """The messages that have arrived, each with its rank, hello among them; waits that long for the first one."""
        received: list[tuple[int, dict[str, Any]]] = []
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                connection = Connection(self._server.accept()[0])
                self._selector.register(connection, selectors.EVENT_READ, connection)
            else:
                received += self._receive(key.data)
        return received

    def _receive(self, connection: Connection) -> list[tuple[int, dict[str, Any]]]:
        messages = connection.receive()
        if messages is None:
            self._selector.unregister(connection)
            connection.close()
            return []
        known = []
        for message in messages:
            if message.get("type") == "hello" and message.get("token") == self.token:
                rank = int(message["rank"])
                self.connections[rank], self._ranks[connection] = connection, rank
            if connection in self._ranks:
                known.append((self._ranks[connection], message))
        return known

    def send_all(self, **message: Any) -> None:
        """Send a message to every rank."""
        for connection in self.connections.values():
            connection.send(**message)

    def close(self) -> None:
        """Close every connection: a rank's agent that is left ends its rank then."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.close()
        self._selector.close()
        self._server.close()
