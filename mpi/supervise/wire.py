"""Signed messages between launcher and agents: records, connections, server.

The connecting end sends a nonce first. The job's token and this nonce make the connection's key. Each line is the
HMAC-SHA256 of a message's direction, number and text, then the text. A text is parsed only if its signature is right;
messages that are foreign, repeated, missing or from another connection close the connection. Nothing is encrypted.
"""

import hmac
import logging
import re
import resource
import secrets
import select
import selectors
import socket
import time
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Union

from msgspec import Meta, MsgspecError, Struct, json, structs

from cputrain.affinity.terminal import printable

logger = logging.getLogger(__name__)


MAX_ITEMS = 1 << 16  # per list
MAX_TEXT = 4096  # characters: the limit for a path
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Texts = Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)]
Integer = Annotated[int, Meta(ge=-(1 << 60), le=1 << 60)]
Number = Annotated[float, Meta(ge=-(1 << 60), le=1 << 60)]

TOKEN_VARIABLE = "CPUTRAIN_JOB_TOKEN"  # the secret that the job's processes share
HEARTBEAT_S, MAX_HEARTBEAT_S = 2.0, 4.0  # between two heartbeats of a rank
RANKS_A_SECOND = 1024  # heartbeats per second, if MAX_HEARTBEAT_S permits: thousands would use much of a core
HEARTBEAT_TIMEOUT_S = 15.0  # limit for either side's silence
ANSWER_S = HEARTBEAT_TIMEOUT_S / 3  # the first heartbeat after this time is answered
SEND_TIMEOUT_S = 5.0  # limit for sending a message
JOIN_TIMEOUT_S = 30.0  # for the answer to a Hello
JOIN_PAUSE_S = 0.05  # after a connection was closed without an answer
MAX_OPENING_BYTES = 1 << 10  # per line, before the first valid signature
MAX_LINE_BYTES = 1 << 19
NONCE = re.compile(rb"[0-9a-f]{32}")

BACKLOG = 4096
ACCEPTED_AT_ONCE = 256
HELLO_TIMEOUT_S = 10.0  # then a connection without a signed Hello is closed
SPARE_CONNECTIONS = 64  # without Hello, beyond one per rank; the oldest is read and closed to make room for a new one
OWN_FILES = 64  # file descriptors that this process needs for other purposes


class ProtocolError(Exception):
    """The other end of a connection sent something that is not a message of this job."""


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag=True):
    """Message: JSON with its fields, and "type", the name of its class."""


class Hello(Message, frozen=True):
    """A rank's first message: its number and its host's name."""

    rank: Integer
    host: Text


class Activity(Message, frozen=True):
    """Heartbeat of a rank: seconds, up to its last reading, for which it has been stopped, idle or busy without a
    break; the collective or message in flight, if its backend tells ("" if none), for `waited_s`. A collective is
    number `number` of a group. `calls`: each group's key, and the number of the last collective called in it."""

    stopped_s: Number = 0.0
    idle_s: Number = 0.0
    busy_s: Number = 0.0
    collective: Text = ""
    waited_s: Number = 0.0
    group: Text = ""
    number: Integer = 0
    calls: Annotated[tuple[tuple[Text, Integer], ...], Meta(max_length=MAX_ITEMS)] = ()


class Exit(Message, frozen=True):
    """A rank's exit: its status (negative if a signal ended it), its log and the log's last lines. `by_job`: the job
    ended it. `shortage`: bytes used, bytes available, and of what, if memory ran out."""

    status: Integer
    tail: Texts
    log: Text
    by_job: bool
    shortage: tuple[Integer, Integer, Text] | None = None


class Stack(Message, frozen=True):
    """The lines of a rank's Python stack, innermost first; empty if it has none."""

    lines: Texts


class Signaled(Message, frozen=True):
    """A stop signal reached the rank's agent, which ends its rank."""

    number: Integer


class Answer(Message, frozen=True):
    """The launching host's answer to a Hello, with the label of the rank's host, or to a heartbeat."""

    label: Text = ""


class Stop(Message, frozen=True):
    """The job ends: each rank has grace_s until it is killed."""

    grace_s: Number


class Preempt(Message, frozen=True):
    """Order to send the rank the preemption signal."""


class ShowStack(Message, frozen=True):
    """Request for the rank's Python stack."""


def encode_message(message: Message) -> bytes:
    """Encode a message as JSON; "type" is the name of its class."""
    return json.encode(_printable(message))


def decode(data: bytes, types: tuple[type, ...]) -> Any:
    """Decode a message of one of these types. Raises ProtocolError on anything else."""
    try:
        return _printable(_decoder(types).decode(data))
    except (MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(str(error)) from None


@cache
def _decoder(types: tuple[type, ...]) -> json.Decoder[Any]:
    return json.Decoder(Union[types])  # noqa: UP007  the number of types varies


def _printable(value: Any) -> Any:
    """Escape control codes in texts for terminals, and cut texts that are then too long."""
    if isinstance(value, str):
        return printable(value)[:MAX_TEXT]
    if isinstance(value, tuple):
        return tuple(map(_printable, value))
    if isinstance(value, Message):
        return structs.replace(value, **{name: _printable(field) for name, field in structs.asdict(value).items()})
    return value


def heartbeat_interval(ranks: int) -> float:
    """Return the seconds between two heartbeats of each rank for this number of ranks."""
    return min(max(HEARTBEAT_S, ranks / RANKS_A_SECOND), MAX_HEARTBEAT_S)


def new_token() -> str:
    """Generate the token of a new job."""
    return secrets.token_hex(16)


class Signer:
    """Sign the numbered messages of one direction of a connection."""

    def __init__(self, token: str, nonce: bytes, sender: bytes) -> None:
        self._key = hmac.digest(token.encode(), b"cputrain connection " + nonce, "sha256")
        self._sender = sender
        self._number = 0

    def sign(self, text: bytes) -> bytes:
        """Return the signature of the next message."""
        numbered = self._sender + self._number.to_bytes(8, "big") + text
        self._number += 1
        return hmac.digest(self._key, numbered, "sha256").hex().encode()


class Connection:
    """One end of a connection. `accepts` are the types of messages that may arrive.

    `nonce` is the connecting end's nonce; the accepting end passes None and waits for it.
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
        """Return the file descriptor, for selectors."""
        return self.socket.fileno()

    def send(self, message: Any) -> bool:
        """Send a message; return False if the other end is gone or reads nothing."""
        if self._ours is None:
            return False
        text = encode_message(message)
        return self._send(self._ours.sign(text) + b" " + text)

    def _send(self, line: bytes) -> bool:
        data, sent = line + b"\n", 0
        try:
            with suppress(BlockingIOError):
                sent = self.socket.send(data)  # usually all of it
            if sent < len(data):
                self.socket.settimeout(SEND_TIMEOUT_S)
                self.socket.sendall(data[sent:])
                self.socket.setblocking(False)
        except OSError:
            return False
        return True

    def receive(self) -> list[Any] | None:
        """Return the complete messages that have arrived; None if the other end is gone or sent something invalid."""
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

    def wait(self, deadline: float) -> list[Any]:
        """Return the next messages; none if the connection is closed or nothing arrives by the deadline (monotonic)."""
        while (remaining_s := deadline - time.monotonic()) > 0:
            if select.select([self], [], [], remaining_s)[0] and (messages := self.receive()) != []:
                return messages or []
        return []

    def _read(self, line: bytes) -> list[Any]:
        """Return the message of a line; the nonce's line contains none."""
        self._check_length(line)
        if self._theirs is None:
            if not NONCE.fullmatch(line):
                raise ProtocolError("invalid nonce")
            self._start(line, b"accepting", b"connecting")
            return []
        signature, _, text = line.partition(b" ")
        if not hmac.compare_digest(signature, self._theirs.sign(text)):
            raise ProtocolError("invalid signature")
        self._trusted = True
        return [decode(text, self._accepts)]

    def _check_length(self, line: bytes) -> None:
        if len(line) > (MAX_LINE_BYTES if self._trusted else MAX_OPENING_BYTES):
            raise ProtocolError("line too long")

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def connect(address: str, token: str, accepts: tuple[type, ...], timeout_s: float = HEARTBEAT_TIMEOUT_S) -> Connection:
    """Connect to HOST:PORT. Raises OSError if it cannot be reached."""
    host, _, port = address.rpartition(":")
    connected = socket.create_connection((host, int(port)), timeout=timeout_s)
    return Connection(connected, token, accepts, secrets.token_hex(16).encode())


def join_job(address: str, token: str, accepts: tuple[type, ...], hello: Hello) -> tuple[Connection, list[Any]]:
    """Connect to the launching host's HOST:PORT and send Hello; return the connection and the messages in answer.

    Reconnects if the connection is closed before: foreign connections may crowd it out. Raises OSError if the host
    cannot be reached or does not answer within JOIN_TIMEOUT_S.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while (remaining_s := deadline - time.monotonic()) > 0:
        connection = connect(address, token, accepts, remaining_s)
        connection.send(hello)
        if answer := connection.wait(deadline):
            return connection, answer
        connection.close()
        time.sleep(JOIN_PAUSE_S)
    raise TimeoutError(f"no answer in {JOIN_TIMEOUT_S:g} s")


class RankServer:
    """Accept connections and receive messages from those that sent Hello, signed with the job's token.

    `hosts` are the ranks' hosts, `address` is this host's address for them, `accepts` are the types of the ranks'
    messages. A connection that sends anything else is closed, without further effect; one whose signed Hello does not
    fit the job is told to stop.
    """

    def __init__(self, token: str, hosts: tuple[str, ...], address: str, accepts: tuple[type, ...]) -> None:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # each rank needs a connection
        self.token = token
        self.connections: dict[int, Connection] = {}
        self.lost: set[int] = set()  # ranks whose connections have been closed
        self._hosts = hosts
        self._accepts = (Hello, *accepts)
        room = len(hosts) + SPARE_CONNECTIONS
        self._max_waiting = (
            room if hard_limit == resource.RLIM_INFINITY else max(1, min(room, hard_limit - len(hosts) - OWN_FILES))
        )
        self._waiting: dict[Connection, float] = {}  # connections without Hello -> deadlines, oldest first
        self._ranks: dict[Connection, int] = {}
        self._names: dict[str, str] = {}  # host -> its name for itself, as its ranks report it
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)

    @property
    def port(self) -> int:
        """The port where it listens."""
        return int(self._server.getsockname()[1])

    def poll(self, timeout_s: float) -> list[tuple[int, Any]]:
        """Return the messages that have arrived, with their ranks; wait up to timeout_s for the first."""
        received: list[tuple[int, Any]] = []
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                # Many at once, as all ranks of a job connect together, but limited, or strangers could block this loop.
                all(self._accept(received) for _ in range(ACCEPTED_AT_ONCE))
            elif key.data in self._waiting or key.data in self._ranks:  # not closed meanwhile
                received += self._receive(key.data)
        now = time.monotonic()
        for connection in [connection for connection, deadline in self._waiting.items() if deadline < now]:
            self._close(connection)
        return received

    def _accept(self, received: list[tuple[int, Any]]) -> bool:
        """Accept a connection; return whether there was one. Messages read to make room are added to `received`."""
        try:
            accepted, _ = self._server.accept()
        except BlockingIOError:
            return False
        except OSError:  # the other end is gone, or no file descriptor is left
            received += self._make_room()
            return False
        if len(self._waiting) >= self._max_waiting:
            received += self._make_room()
        connection = Connection(accepted, self.token, self._accepts, None)
        self._waiting[connection] = time.monotonic() + HELLO_TIMEOUT_S
        self._selector.register(connection, selectors.EVENT_READ, connection)
        return True

    def _make_room(self) -> list[tuple[int, Any]]:
        """Read the oldest connection without Hello, and close it if it still has none; return the messages."""
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
        except ProtocolError as error:  # signed with the token, so from the job itself
            logger.warning("cputrain: a rank's connection was closed: %s", error)
            connection.send(Stop(grace_s=0.0))
            self._close(connection)
            return []

    def _sender(self, connection: Connection, message: Any) -> int:
        """Return the rank of a message. Raises ProtocolError if it does not fit the job."""
        rank = self._ranks.get(connection)
        if rank is not None and not isinstance(message, Hello):
            return rank
        if rank is not None or not isinstance(message, Hello):
            raise ProtocolError("the first message is not Hello")
        self._check(message)
        del self._waiting[connection]
        self.connections[message.rank], self._ranks[connection] = connection, message.rank
        return message.rank

    def _check(self, hello: Hello) -> None:
        """Raise ProtocolError if rank and host do not fit the job: each rank connects once, and the ranks of a host
        report one name. It may differ from the name in the job, which may be an alias or an address."""
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
        """Close a rank's connection because it sent values that no rank of this job can have."""
        if (connection := self.connections[rank]) in self._ranks:
            logger.warning("cputrain: rank %d's connection was closed: it sent an invalid exit", rank)
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
        """Close every connection; agents that are left then end their ranks."""
        for connection in (*self._waiting, *self._ranks):
            connection.close()
        self._selector.close()
        self._server.close()
