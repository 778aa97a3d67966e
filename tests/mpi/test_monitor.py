"""Heartbeats: silence, stops, strangers, and a job of many ranks."""

import math
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cputrain.mpi.supervise.monitor import Monitor
from cputrain.mpi.supervise.processes import RankExit, describe_exit, first_cause
from cputrain.mpi.supervise.stalls import describe_stopped, stopped_rank
from cputrain.mpi.supervise.wire import Activity, Answer, Connection, Exit, Preempt, Signaled, decode, encode_message
from tests.support.jobs import agent, agent_process, poll_until

RANKS = 2000
HANGS_S = 120.0


class Clock:
    """A monitor's clock that is advanced by hand, so that pauses of this machine do not count."""

    def __init__(self, monitor: Monitor) -> None:
        self.now = monitor.clock.now()
        monitor.clock._monotonic = lambda: self.now


@contextmanager
def agents(monitor: Monitor, ranks: int) -> Iterator[list[Connection]]:
    """The connections of the first ranks, which have said Hello."""
    connections = [agent(monitor, rank) for rank in range(ranks)]
    await_hello(monitor, ranks)
    yield connections
    for connection in connections:
        connection.close()


def await_hello(monitor: Monitor, ranks: int) -> None:
    poll_until(monitor, lambda: len(monitor.ranks) >= ranks)
    assert len(monitor.ranks) == ranks


@pytest.fixture
def monitor(request: pytest.FixtureRequest) -> Iterator[Monitor]:
    monitor = Monitor("secret", tuple(f"h{i}" for i in range(RANKS)), **getattr(request, "param", {}))
    yield monitor
    monitor.close()


@pytest.mark.parametrize("monitor", [{"timeout_s": 1.5}], indirect=True)
def test_silence_is_a_failure(monitor: Monitor) -> None:
    clock = Clock(monitor)
    with agents(monitor, 2) as connections:
        for _ in range(4):
            assert monitor.failed() == []
            clock.now += 0.4
            connections[0].send(Activity())
            poll_until(monitor, lambda: monitor.ranks[0].heartbeat == clock.now)
        assert [one.state.rank for one in monitor.failed()] == [1]
        assert "rank 1 on h1 has been silent for 1.5 s" in monitor.cause()


def test_a_stopped_rank_is_named_while_another_one_runs(monitor: Monitor) -> None:
    with agents(monitor, 2) as connections:
        connections[1].send(Activity(stopped_s=11.0))
        poll_until(monitor, lambda: stopped_rank(monitor.rank_states()))
        found = stopped_rank(monitor.rank_states())
        assert found is not None and describe_stopped(found).startswith("rank 1 on h1 has been stopped for 11 s")


def test_an_agent_that_is_gone_is_a_failure_at_once(monitor: Monitor) -> None:
    with agents(monitor, 2) as connections:
        connections[1].close()
        poll_until(monitor, monitor.failed)
        assert "rank 1 on h1 has lost its agent" in monitor.cause()


@pytest.mark.parametrize("monitor", [{"timeout_s": 10.0}], indirect=True)
def test_the_silence_of_ranks_does_not_count_while_the_monitor_is_suspended(monitor: Monitor) -> None:
    """Of the whole job, the launching host goes on first."""
    with agents(monitor, 1):
        suspended_s = 22.0
        monitor.clock._monotonic = lambda: time.monotonic() + suspended_s
        monitor.poll(0.05)
        assert monitor.failed() == []


def test_strangers_and_noise_are_ignored(monitor: Monitor) -> None:
    stranger = agent(monitor, 0, token="guess")
    noise = socket.create_connection(("127.0.0.1", monitor.port))
    noise.sendall(b"GET / HTTP/1.1\r\n\r\n")
    friend = agent(monitor, 3)
    await_hello(monitor, 1)
    assert list(monitor.ranks) == [3] and monitor.failed() == []
    for end in (stranger, noise, friend):
        end.close()


@pytest.mark.slow
def test_a_preemption_between_two_halves_of_a_message_is_the_next_message(monitor: Monitor) -> None:
    """The signal comes when an answer is signed and not yet sent: the rank takes both, by their numbers."""
    connection, *others = (agent(monitor, rank) for rank in range(RANKS))
    await_hello(monitor, RANKS)
    server_end = monitor._server.connections[0]
    send = server_end._send

    def interrupted(line: bytes) -> bool:
        server_end._send = send
        monitor.preempt()
        return send(line)

    server_end._send = interrupted
    monitor.ranks[0].answered = -math.inf
    connection.send(Activity())
    received: list[object] = []
    poll_until(monitor, lambda: received.extend(connection.receive() or []) or len(received) >= 3)
    assert received == [Answer(label="h0"), Answer(), Preempt()]
    for each in (connection, *others):
        each.close()


@pytest.mark.slow
def test_a_preemption_while_ranks_start_reaches_all(monitor: Monitor) -> None:
    """The scheduler's warning comes early in a job that waits for slow hosts."""
    first = agent(monitor, 0)
    await_hello(monitor, 1)
    monitor.preempt()
    monitor.poll(0.05)
    assert first.receive() == [Answer(label="h0")]
    connections = [first, *(agent(monitor, rank) for rank in range(1, RANKS))]
    await_hello(monitor, RANKS)
    monitor.poll(0.05)
    deadline, received = time.monotonic() + HANGS_S, {i: [] for i in range(RANKS)}
    while not all(Preempt() in each for each in received.values()) and time.monotonic() < deadline:
        monitor.poll(0.05)
        for i, connection in enumerate(connections):
            received[i] += connection.receive() or []
    assert received == {i: [*([Answer(label=f"h{i}")] if i else []), Preempt()] for i in range(RANKS)}
    for connection in connections:
        connection.close()


def test_the_first_cause_is_the_signal(monitor: Monitor) -> None:
    with agents(monitor, 3) as connections:
        connections[1].send(Exit(status=1, tail=("lost a peer",), log="l", by_job=False))
        connections[2].send(Exit(status=-9, tail=(), log="l", by_job=False))
        connections[0].send(Exit(status=1, tail=(), log="l", by_job=True))
        poll_until(monitor, lambda: len(monitor.failed()) >= 2)
        assert sorted(one.state.rank for one in monitor.failed()) == [1, 2]
        assert "rank 2 on h2 was ended by SIGKILL" in monitor.cause()


@pytest.mark.slow
def test_many_ranks(monitor: Monitor) -> None:
    connections = []
    for rank in range(1500):
        connections.append(agent(monitor, rank))
        if rank % 20 == 0:
            monitor.poll(0)
    await_hello(monitor, 1500)
    for rank, connection in enumerate(connections):
        monitor.ranks[rank].answered = -math.inf
        connection.send(Activity())
    deadline = time.monotonic() + HANGS_S
    answered = 0
    while answered < 2 * 1500 and time.monotonic() < deadline:  # a Hello and a heartbeat of each
        monitor.poll(0.05)
        answered += sum(len(connection.receive() or ()) for connection in connections)
    assert answered == 2 * 1500
    for connection in connections:
        connection.close()


def test_the_agent_of_a_rank_that_failed_stays_until_the_job_ends(monitor: Monitor, tmp_path: Path) -> None:
    """A launcher that sees it exit ends the other ranks, whose exits would then be taken for the cause."""
    with agent_process(monitor, tmp_path / "logs", "sh", "-c", "exit 3") as process:
        await_hello(monitor, 1)
        poll_until(monitor, monitor.failed)
        assert "rank 0 on " in monitor.cause()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        monitor.stop(3.0)
        assert process.wait(HANGS_S) == 3


def test_agents_that_a_signal_stops_alone_are_a_failure(monitor: Monitor) -> None:
    """As where one host is preempted; a scheduler that ends the job signals all of them."""
    clock = Clock(monitor)
    with agents(monitor, 3) as connections:
        for rank in (1, 2):
            connections[rank].send(Signaled(number=15))
            connections[rank].send(Exit(status=-15, tail=("half way",), log="l", by_job=True))
        poll_until(monitor, lambda: all(monitor.ranks[rank].state.exit for rank in (1, 2)))
        for _ in range(2):
            clock.now += 4.0
            assert monitor.failed() == []
        clock.now += 4.0
        assert [one.state.rank for one in monitor.failed()] == [1, 2]
        expected = "the agent of rank 1 on h1 was stopped by SIGTERM, while other ranks kept running; rank 1 on h1 was"
        assert monitor.cause().startswith(expected) and "  | half way" in monitor.cause()
        connections[0].send(Signaled(number=15))
        poll_until(monitor, lambda: monitor.ranks[0].signal)
        clock.now += 1.0
        assert monitor.failed() == [], "all of them: the job was ended"


@pytest.mark.parametrize("delay_s", [None, 0.0, 0.02, 0.1, 0.5])
def test_an_agent_ends_with_its_rank_at_whatever_moment_a_signal_stops_it(
    monitor: Monitor, tmp_path: Path, delay_s: float | None
) -> None:
    """After its Hello; None: as soon as the rank runs, which signals its agent."""
    at_once = "kill -TERM $PPID; " if delay_s is None else ""
    rank = ("sh", "-c", f"echo $$ > {tmp_path}/pid; {at_once}exec sleep 300")
    with agent_process(monitor, tmp_path / "logs", *rank) as process:
        await_hello(monitor, 1)
        if delay_s is not None:
            poll_until(monitor, lambda: None, delay_s)
            process.send_signal(signal.SIGTERM)
        poll_until(monitor, lambda: process.poll() is not None, 60)
        assert process.poll() in (1, -signal.SIGTERM), "the latter before it has started the rank"
    pid = (tmp_path / "pid").read_text().strip() if (tmp_path / "pid").exists() else ""
    assert not pid or not Path(f"/proc/{pid}").exists()
    poll_until(monitor, lambda: None, 0.2)
    reported = monitor.ranks[0]
    assert reported.state.exit is None or (reported.signal, reported.by_job) == (signal.SIGTERM, True)


def test_an_agent_that_cannot_start_its_rank_says_why(monitor: Monitor, tmp_path: Path) -> None:
    """It is neither killed nor cut off."""
    (tmp_path / "file").write_text("")
    with agent_process(monitor, tmp_path / "file/logs", "true", stderr=subprocess.PIPE) as process:
        await_hello(monitor, 1)
        poll_until(monitor, monitor.failed)
        assert "exited with status 1" in monitor.cause() and "file/logs: Not a directory" in monitor.cause()
        monitor.stop(3.0)
        _, err = process.communicate(timeout=HANGS_S)
        assert process.returncode == 1 and err.startswith("cputrain.mpi.supervise.agent: ")


@pytest.mark.parametrize("character", ["x", "\ue0b0", "\udcff", "\x07"])
def test_an_exit_arrives_whatever_characters_its_rank_has_printed(character: str) -> None:
    """As codes they are longer than a text may be."""
    sent = Exit(status=1, tail=(1000 * character,), log=f"/{1100 * character}", by_job=False)
    received = decode(encode_message(sent), (Exit,))
    assert received.status == 1 and received.tail[0] and received.log.startswith("/")


def exit_of(rank: int, status: int, time: float, tail: tuple[str, ...] = ()) -> RankExit:
    return RankExit(rank=rank, host="h1", status=status, time=time, log="rank.log", tail=tail)


def test_the_earliest_exit_is_the_cause() -> None:
    """A rank that gives up, and peers that abort because of it."""
    assert first_cause([exit_of(0, -6, 3.4), exit_of(1, 1, 3.0), exit_of(2, -6, 3.5)]).rank == 1


def test_of_exits_noticed_together_one_by_a_signal_is_the_cause() -> None:
    assert first_cause([exit_of(0, 1, 3.00), exit_of(1, 1, 3.02), exit_of(2, -9, 3.10)]).rank == 2
    assert first_cause([exit_of(1, 1, 3.0), exit_of(0, 1, 3.0)]).rank == 0


def test_an_exit_is_described_with_its_last_lines() -> None:
    text = describe_exit(exit_of(3, -9, 0.0, ("one", "two")))
    assert text == "rank 3 on h1 was ended by SIGKILL; log rank.log; its last lines:\n  | one\n  | two"
    assert describe_exit(exit_of(3, 7, 0.0)) == "rank 3 on h1 exited with status 7; log rank.log; it printed nothing"
