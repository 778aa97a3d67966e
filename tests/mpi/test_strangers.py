"""The port of a job's monitor, reached by others: no connection without the job's token ends or steers the job, and no
message behind it ends the monitor."""

import hmac
import json
import math
import os
import random
import resource
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.affinity.rank import address_to
from cputrain.affinity.terminal import JOINERS
from cputrain.mpi.supervise import wire
from cputrain.mpi.supervise.monitor import Monitor
from cputrain.mpi.supervise.processes import RankExit, describe_exit
from cputrain.mpi.supervise.wire import (
    Activity,
    Answer,
    Connection,
    Exit,
    Hello,
    Preempt,
    ProtocolError,
    ShowStack,
    Signer,
    Stack,
    Stop,
    decode,
    encode_message,
    join_job,
)
from tests.support.jobs import agent, poll_until

TOKEN = "secret"
HOSTS = tuple(f"h{i // 2}" for i in range(8))
ORDERS = (Answer, Stop, Preempt, ShowStack)
REPORTS = (Hello, Activity, Exit, Stack)
EXIT = Exit(status=1, tail=("a line",), log="rank-0.log", by_job=False)


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    monitor = Monitor(TOKEN, HOSTS)
    yield monitor
    monitor.close()


def stranger(monitor: Monitor) -> socket.socket:
    return socket.create_connection(("127.0.0.1", monitor.port), timeout=5)


def poll(monitor: Monitor, seconds: float = 0.2) -> None:
    """Let the monitor work for so long, and for ten turns at least: on a busy machine a turn may take long."""
    deadline, turns = time.monotonic() + seconds, 0
    while turns < 10 or time.monotonic() < deadline:
        monitor.poll(0.02)
        turns += 1


def is_closed(connected: socket.socket) -> bool:
    """Whether the monitor has closed it, after what it may have sent."""
    connected.settimeout(0.5)
    try:
        while connected.recv(1 << 10):
            pass
        return True
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def signed(texts: list[bytes]) -> bytes:
    """A connection's whole data: the nonce, then texts that are signed with the job's token."""
    nonce = secrets.token_hex(16).encode()
    signer = Signer(TOKEN, nonce, b"connecting")
    return b"".join([nonce, b"\n", *(signer.sign(text) + b" " + text + b"\n" for text in texts)])


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 30_000 + b"\n",
        b"\n" * 10_000,
        b"\x00" * 100_000,
        b"0" * 32 + b"\n" + b"[" * 30_000 + b"\n",
        b"0" * 32 + b"\n" + b"f" * 64 + b' {"type": "Hello", "rank": 0, "host": "h0"}\n',
        b'{"type": "hello", "token": "guess", "rank": 0, "host": "h0"}\n',
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["nesting", "empty lines", "no line", "nesting after a nonce", "a wrong signature", "a guess", "a browser"],
)
def test_noise_ends_its_own_connection_only(monitor: Monitor, data: bytes) -> None:
    friend = agent(monitor, 0)
    poll(monitor)
    assert friend.receive() == [Answer(label="h0")]
    with stranger(monitor) as noise:
        noise.sendall(data)
        poll(monitor)
        assert is_closed(noise)
    before = monitor.ranks[0].heartbeat
    friend.send(Activity())
    poll_until(monitor, lambda: monitor.ranks[0].heartbeat > before)
    assert list(monitor.ranks) == [0] and not monitor.failed() and friend.receive() in ([], [Answer()])
    friend.close()


OPEN_MANY = """
import resource, socket, sys, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
idle = []
for _ in range(int(sys.argv[2])):
    idle.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("spare_files", "strangers"), [(None, 3000), (20, 300)])
def test_idle_connections_leave_room_for_the_ranks(monitor: Monitor, spare_files: int | None, strangers: int) -> None:
    """More than are kept, and more than this process may open: the oldest make room."""
    first = agent(monitor, 0)
    poll(monitor)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    own_files = len(list(Path("/proc/self/fd").iterdir()))
    argv = [sys.executable, "-c", OPEN_MANY, str(monitor.port), str(strangers)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if spare_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (own_files + spare_files, before[1]))
        try:
            os.set_blocking(process.stdout.fileno(), False)
            deadline = time.monotonic() + 60
            while not process.stdout.read(1) and time.monotonic() < deadline:
                poll(monitor, 0.05)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        kept = len(list(Path("/proc/self/fd").iterdir())) - own_files
        assert kept <= len(HOSTS) + wire.SPARE_CONNECTIONS + 2  # and the pipes
        second = agent(monitor, 1, "h0")
        poll_until(monitor, lambda: len(monitor.ranks) == 2)
        assert sorted(monitor.ranks) == [0, 1]
        assert [connection.receive() for connection in (first, second)] == [[Answer(label="h0")]] * 2
        for rank, connection in enumerate((first, second)):
            monitor.ranks[rank].answered = -math.inf
            connection.send(Activity())
        poll(monitor)
        assert [connection.receive() for connection in (first, second)] == [[Answer()]] * 2
        first.close()
        second.close()
        process.stdin.close()


def test_a_rank_among_strangers_is_read_before_it_makes_room(monitor: Monitor) -> None:
    """More strangers than are kept connect after it, before the monitor's next turn."""
    rank = agent(monitor, 0)
    strangers = [stranger(monitor) for _ in range(len(HOSTS) + wire.SPARE_CONNECTIONS + 20)]
    poll(monitor)
    assert list(monitor.ranks) == [0] and not monitor.failed() and rank.receive() == [Answer(label="h0")]
    for connected in (rank, *strangers):
        connected.close()


CONNECT_ON_AND_ON = """
import socket, sys
kept = []
while True:
    try:
        kept.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5))
    except OSError:
        pass
    if len(kept) > 300:
        kept.pop(0).close()
    if len(kept) == 200:
        print("flood", flush=True)
"""


def test_ranks_join_while_strangers_connect_on_and_on(monitor: Monitor) -> None:
    argv = [sys.executable, "-c", CONNECT_ON_AND_ON, str(monitor.port)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as flood, ThreadPoolExecutor(len(HOSTS)) as pool:
        try:
            assert flood.stdout is not None
            os.set_blocking(flood.stdout.fileno(), False)
            deadline = time.monotonic() + 60
            while not flood.stdout.read(1) and time.monotonic() < deadline:
                poll(monitor, 0.05)
            hellos = [Hello(rank=rank, host=f"host{rank // 2}") for rank in range(len(HOSTS))]
            joining = [pool.submit(join_job, f"127.0.0.1:{monitor.port}", TOKEN, ORDERS, hello) for hello in hellos]
            while not all(one.done() for one in joining):
                monitor.poll(0.05)
        finally:
            flood.kill()
    joined = [one.result() for one in joining]
    assert sorted(monitor.ranks) == list(range(len(HOSTS))) and not monitor.failed()
    assert [list(map(type, answer)) for _, answer in joined] == [[Answer]] * len(HOSTS)
    for connection, _ in joined:
        connection.close()


def test_an_agent_connects_again_until_it_is_answered(monitor: Monitor) -> None:
    """The first connection is closed with its Hello unread, as by a monitor that makes room."""
    with socket.create_server(("127.0.0.1", 0)) as crowded, ThreadPoolExecutor(1) as pool:
        port = crowded.getsockname()[1]
        joining = pool.submit(join_job, f"127.0.0.1:{port}", TOKEN, ORDERS, Hello(rank=3, host="h"))
        crowded.accept()[0].close()
        accepted = Connection(crowded.accept()[0], TOKEN, REPORTS, None)
        while not (messages := accepted.receive()):
            time.sleep(0.01)
        accepted.send(Answer())
        connection, answer = joining.result(timeout=120)
    assert messages == [Hello(rank=3, host="h")] and answer == [Answer()]
    connection.close()
    accepted.close()


def test_a_connection_without_hello_is_closed_in_time(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HELLO_TIMEOUT_S", 0.3)
    with stranger(monitor) as idle, stranger(monitor) as slow:
        slow.sendall(b"0" * 32 + b"\n")
        poll(monitor, 0.6)
        assert is_closed(idle) and is_closed(slow)


@pytest.mark.slow
def test_a_recorded_connection_cannot_be_repeated(monitor: Monitor) -> None:
    """The same bytes on another connection; the messages of one connection on another one, or in another order."""
    recorded = signed([encode_message(Hello(rank=0, host="host0")), encode_message(EXIT)])
    nonce, hello, report = recorded.splitlines(keepends=True)
    others = signed([encode_message(Hello(rank=1, host="host0"))])
    for data in (nonce + report, others + hello, others + report, nonce + hello + hello):
        with stranger(monitor) as attacker:
            attacker.sendall(data)
            poll(monitor, 0.1)
            assert is_closed(attacker)
    with stranger(monitor) as rank:
        rank.sendall(nonce + hello)
        poll(monitor, 0.1)
        assert list(monitor.ranks) == [0]
    with stranger(monitor) as attacker:
        attacker.sendall(recorded)
        poll(monitor, 0.1)
        assert is_closed(attacker)
    assert not any(one.state.exit for one in monitor.ranks.values())


@pytest.mark.parametrize(("rank", "host"), [(8, "h4"), (-1, "h0"), (0, "h0"), (1, "another")])
def test_rank_and_host_have_to_fit_the_job(
    monitor: Monitor, rank: int, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks 0 to 7 of four hosts; rank 0 is there, on h0."""
    friend = agent(monitor, 0)
    poll(monitor)
    other = agent(monitor, rank, host)
    poll(monitor)
    assert is_closed(other.socket) and list(monitor.ranks) == [0]
    assert f"rank {rank} " in caplog.text
    friend.send(EXIT)
    poll(monitor)
    assert monitor.ranks[0].state.exit is not None
    friend.close()
    other.close()


ODD = [None, True, -1, 10**30, 1e400, "x", "x" * 10_000, "\x1b[2J", [], ["a"] * 3, [[[[]]]], {}, {"a": {"b": {}}}, 999]
NAMES = ["type", "rank", "host", "status", "tail", "log", "by_job", "shortage", "idle_s", "extra"]


def odd_message(randomness: random.Random) -> bytes:
    """A message of the protocol with odd values, or fewer or more fields; or what is no message."""
    if randomness.random() < 0.1:
        return randomness.choice([b"[" * 30_000, b"", b"null", b"7", b'"x"', b"\xff\xfe", b'{"type":', b"NaN"])
    good = randomness.choice([Hello(rank=randomness.randrange(8), host="host0"), Activity(), EXIT])
    fields = json.loads(encode_message(good))
    for _ in range(randomness.randrange(1, 4)):
        fields[randomness.choice(NAMES)] = randomness.choice(ODD)
    if randomness.random() < 0.3:
        fields.pop(randomness.choice(list(fields)))
    return json.dumps(fields).encode()


@pytest.mark.slow
def test_two_thousand_odd_messages_behind_a_valid_token_end_no_monitor(monitor: Monitor) -> None:
    randomness = random.Random(7)
    for i in range(2000):
        with stranger(monitor) as insider:
            hello = encode_message(Hello(rank=i % 8, host=f"host{i % 8 // 2}"))
            insider.sendall(signed([*([hello] if randomness.random() < 0.5 else []), odd_message(randomness)]))
            monitor.poll(0)
            monitor.poll(0)
    poll(monitor)
    monitor.failed()
    if monitor.failed():
        assert monitor.cause().isprintable() or "\n  | " in monitor.cause()
    assert len(monitor.ranks) <= 8


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
EXITS = st.builds(
    Exit,
    status=st.integers(-64, 255),
    tail=st.lists(st.text(max_size=80)).map(tuple),
    log=st.text(max_size=80),
    by_job=st.booleans(),
)


@pytest.mark.slow
@given(st.recursive(SCALARS, lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_whatever_is_decoded_is_a_message_or_refused(value: object) -> None:
    for data in (json.dumps(value).encode(), json.dumps({"type": "Exit", "status": value}).encode()):
        with pytest.raises(ProtocolError):
            decode(data, REPORTS)


@given(EXITS)
def test_no_control_character_of_a_message_reaches_the_terminal(message: Exit) -> None:
    decoded = decode(encode_message(message), REPORTS)
    assert shows_as_is(decoded.log) and all(map(shows_as_is, decoded.tail))
    shown = describe_exit(
        RankExit(rank=0, host="h", status=decoded.status, time=0.0, log=decoded.log, tail=decoded.tail)
    )
    assert all(map(shows_as_is, shown.split("\n")))


def shows_as_is(text: str) -> bool:
    """Whether a terminal obeys nothing in a line; joiners are no control characters."""
    return text.translate(dict.fromkeys(map(ord, JOINERS))).isprintable()


def test_the_last_lines_of_a_rank_are_shown_without_colors_and_progress() -> None:
    status = RankExit(rank=0, host="h", status=-40, time=0.0, log="l", tail=("10 %\r20 %", "\x1b[2Jx"))
    assert describe_exit(status).endswith("was ended by signal 40; log l; its last lines:\n  | 20 %\n  | x")


def test_the_monitor_listens_on_one_address_only() -> None:
    """That of the route to the job's hosts: another address of this host refuses."""
    monitor = Monitor(TOKEN, ("h0",), "127.0.0.1")
    try:
        own = address_to("192.0.2.1")
    except OSError:
        own = "127.0.0.2"
    with pytest.raises(OSError):
        socket.create_connection((own if own != "127.0.0.1" else "127.0.0.2", monitor.port), timeout=2)
    monitor.close()


def test_an_agent_without_the_token_says_so(tmp_path: Path) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    report = ("--report-to", "127.0.0.1:9", "--into", str(tmp_path))
    command = (sys.executable, "-m", "cputrain.mpi.supervise.agent", *report)
    result = subprocess.run((*command, "--", "true"), env=world, capture_output=True, text=True)
    assert result.returncode == 2 and "CPUTRAIN_JOB_TOKEN is not set on" in result.stderr


def test_signatures_are_those_of_hmac_sha256() -> None:
    """The words of the protocol, computed a second time."""
    key = hmac.new(b"secret", b"cputrain connection " + b"0" * 32, "sha256").digest()
    expected = hmac.new(key, b"connecting" + bytes(7) + b"\x01" + b"text", "sha256").hexdigest().encode()
    signer = Signer("secret", b"0" * 32, b"connecting")
    signer.sign(b"before")
    assert signer.sign(b"text") == expected
