"""The connection between a rank's host and the host that launched the job: JSON messages, one per line."""

import json
import socket
from typing import Any

TOKEN_VARIABLE = "CPUTRAIN_JOB_TOKEN"  # lets the server tell the job's own ranks from strangers who find its port
HEARTBEAT_S = 2.0  # between two heartbeats of a rank
HEARTBEAT_TIMEOUT_S = 15.0  # neither side waits longer for the other's heartbeat
GRACE_S = 3.0  # an agent gives its rank between SIGTERM and SIGKILL
STOP_S = GRACE_S + 1.0  # the launching host waits from "stop" to the end of the agents
SEND_TIMEOUT_S = 5.0  # a message waits no longer for room
MAX_MESSAGE_BYTES = 1 << 20


class Connection:
    """One end of a connection; what arrives is kept until a whole message is there."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self._received = b""

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, **message: Any) -> bool:
        """Send a message; False when the other end is gone or takes no more."""
        try:
            self.socket.settimeout(SEND_TIMEOUT_S)
            self.socket.sendall(json.dumps(message).encode() + b"\n")
            self.socket.setblocking(False)
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """The whole messages that have arrived; None when the other end is gone, or sends something else."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        if not data or len(self._received) > MAX_MESSAGE_BYTES:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def connect(server: str, token: str, rank: int) -> Connection:
    """Connect as this rank to a job's RankServer at HOST:PORT. Raises OSError where it is out of reach."""
    host, _, port = server.rpartition(":")
    connection = Connection(socket.create_connection((host, int(port)), timeout=HEARTBEAT_TIMEOUT_S))
    connection.send(type="hello", token=token, rank=rank, host=socket.gethostname())
    return connection
