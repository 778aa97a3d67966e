"""How a job's agents and its monitor talk: JSON, a message a line."""

import json
import socket
from typing import Any

TOKEN_VARIABLE = "CPUTRAIN_JOB_TOKEN"  # tells a job's own agents from whoever else finds the monitor's port
BEAT_S = 2.0
SEND_S = 5.0  # a message waits no longer for room
SILENT_S = 15.0  # neither side waits longer for a sign of life
MOST_BYTES = 1 << 20


class Line:
    """One end of a connection; what arrives is kept until a whole message is there."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._received = b""

    def fileno(self) -> int:
        """For selectors."""
        return self.connection.fileno()

    def send(self, **message: Any) -> bool:
        """Send a message; False when the other end is gone or takes no more."""
        try:
            self.connection.settimeout(SEND_S)
            self.connection.sendall(json.dumps(message).encode() + b"\n")
            self.connection.setblocking(False)
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """The whole messages that have arrived; None when the other end is gone, or sends what is no message."""
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        if not data or len(self._received) > MOST_BYTES:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def close(self) -> None:
        """Hang up."""
        self.connection.close()
