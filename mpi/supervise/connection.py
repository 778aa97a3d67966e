"""The connection between a rank's host and the host that launched the job: signed messages, one per line.

The end that connects opens with a nonce. The job's token and this nonce make the connection's key; each line is the
HMAC-SHA256 of direction, number and text of a message, then the text. A text is parsed only where its signature is
right: strangers, and messages that are repeated, left out or from another connection, end the connection. Nothing is
encrypted.
"""

import hmac
import re
import secrets
import select
import socket
import time
from typing import Any

from mpi.supervise.messages import Hello, ProtocolError, decode, encode

TOKEN_VARIABLE = "CPUTRAIN_JOB_TOKEN"  # the secret that the job's own processes share
HEARTBEAT_S, MAX_HEARTBEAT_S = 2.0, 4.0  # between two heartbeats of a rank
RANKS_A_SECOND = 1024  # that send one, while MAX_HEARTBEAT_S allows it: thousands cost the monitor much of a core
HEARTBEAT_TIMEOUT_S = 15.0  # neither side waits longer for the other's message
ANSWER_S = HEARTBEAT_TIMEOUT_S / 3  # the first heartbeat after so long is answered
SEND_TIMEOUT_S = 5.0  # a message waits no longer for room
JOIN_TIMEOUT_S = 30.0  # for the answer to a Hello
JOIN_PAUSE_S = 0.05  # after a connection that was closed without it
MAX_OPENING_BYTES = 1 << 10  # of a line, before the first right signature
MAX_LINE_BYTES = 1 << 19
NONCE = re.compile(rb"[0-9a-f]{32}")


def heartbeat_interval(ranks: int) -> float:
    """Seconds between two heartbeats of each of so many ranks."""
    return min(max(HEARTBEAT_S, ranks / RANKS_A_SECOND), MAX_HEARTBEAT_S)


def new_token() -> str:
    """A token for a new job."""
    return secrets.token_hex(16)


class Signer:
    """Signs the messages of one direction of a connection, each with its number."""

    def __init__(self, token: str, nonce: bytes, sender: bytes) -> None:
        self._key = hmac.digest(token.encode(), b"cputrain connection " + nonce, "sha256")
        self._sender = sender
        self._number = 0

    def sign(self, text: bytes) -> bytes:
        """The signature of the next message."""
        numbered = self._sender + self._number.to_bytes(8, "big") + text
        self._number += 1
        return hmac.digest(self._key, numbered, "sha256").hex().encode()


class Connection:
    """One end of a connection. `accepts` are the types of the messages that may arrive.

    `nonce` is that of the end that connects, None at the end that accepts, which has to wait for it.
    """

    def __init__(self, connected: socket.socket, token: str, accepts: tuple[type, ...], nonce: bytes | None) -> None:
        connected.setblocking(False)
        self.socket = connected
        self._token = token
        self._accepts = accepts
        self._unread = b""
        self._trusted = False
        self._theirs: Signer | None = None
        self._ours: Signer | None = None
        if nonce is not None:
            self._start(nonce, b"connecting", b"accepting")
            self._send(nonce)

    def _start(self, nonce: bytes, us: bytes, them: bytes) -> None:
        self._ours, self._theirs = Signer(self._token, nonce, us), Signer(self._token, nonce, them)

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, message: Any) -> bool:
        """Send a message; False when the other end is gone or takes no more."""
        if self._ours is None:
            return False
        text = encode(message)
        return self._send(self._ours.sign(text) + b" " + text)

    def _send(self, line: bytes) -> bool:
        data = line + b"\n"
        try:
            sent = self._send_at_once(data)
            if sent < len(data):
                self.socket.settimeout(SEND_TIMEOUT_S)
                self.socket.sendall(data[sent:])
                self.socket.setblocking(False)
        except OSError:
            return False
        return True

    def _send_at_once(self, data: bytes) -> int:
        """Send what there is room for, mostly all; the number of bytes."""
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0

    def receive(self) -> list[Any] | None:
        """The whole messages that have arrived; None when the other end is gone, or has sent something else."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        try:
            messages = [message for line in lines for message in self._read(line)]
            self._check_length(self._unread)
        except ProtocolError:
            return None
        return messages if data else None

    def _read(self, line: bytes) -> list[Any]:
        """The message of a line; none in the line of the nonce."""
        self._check_length(line)
        if self._theirs is None:
            if not NONCE.fullmatch(line):
                raise ProtocolError("no nonce")
            self._start(line, b"accepting", b"connecting")
            return []
        signature, _, text = line.partition(b" ")
        if not hmac.compare_digest(signature, self._theirs.sign(text)):
            raise ProtocolError("a wrong signature")
        self._trusted = True
        return [decode(text, self._accepts)]

    def _check_length(self, line: bytes) -> None:
        if len(line) > (MAX_LINE_BYTES if self._trusted else MAX_OPENING_BYTES):
            raise ProtocolError("too long a line")

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def connect(address: str, token: str, accepts: tuple[type, ...], timeout_s: float = HEARTBEAT_TIMEOUT_S) -> Connection:
    """Connect to HOST:PORT. Raises OSError where it is out of reach."""
    host, _, port = address.rpartition(":")
    connected = socket.create_connection((host, int(port)), timeout=timeout_s)
    return Connection(connected, token, accepts, secrets.token_hex(16).encode())


def join(address: str, token: str, accepts: tuple[type, ...], hello: Hello) -> tuple[Connection, list[Any]]:
    """Connect to the launching host's HOST:PORT and say Hello; the connection and the messages that answer it.

    Connects again where the connection is closed before: strangers may crowd it out. Raises OSError where the host is
    out of reach, or answers nothing in JOIN_TIMEOUT_S.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while (left := deadline - time.monotonic()) > 0:
        connection = connect(address, token, accepts, left)
        connection.send(hello)
        if answer := _await_messages(connection, deadline):
            return connection, answer
        connection.close()
        time.sleep(JOIN_PAUSE_S)
    raise TimeoutError(f"no answer in {JOIN_TIMEOUT_S:g} s")


def _await_messages(connection: Connection, deadline: float) -> list[Any]:
    """The next messages; none where the connection is closed, or nothing arrives until then."""
    while (left := deadline - time.monotonic()) > 0:
        if select.select([connection], [], [], left)[0] and (messages := connection.receive()) != []:
            return messages or []
    return []
