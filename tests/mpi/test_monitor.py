"""Signs of life: silence, stops, strangers, and a job of many ranks."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpi.supervise import monitor as module
from mpi.supervise.connection import TOKEN_VARIABLE, Line
from mpi.supervise.monitor import Monitor, cause_of


def agent(monitor: Monitor, rank: int, token: str = "secret") -> Line:
    line = Line(socket.create_connection(("127.0.0.1", monitor.port)))
    line.send(what="hello", token=token, rank=rank, host=f"h{rank}")
    return line


def heard(monitor: Monitor, ranks: int) -> None:
    deadline = time.monotonic() + 20
    while len(monitor.ranks) < ranks and time.monotonic() < deadline:
        monitor.poll(0.1)
    assert len(monitor.ranks) == ranks


@pytest.fixture
def monitor():
    made = Monitor(token="secret")
    yield made
    made.close()


def test_silence_is_a_failure(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 1.5)
    lines = [agent(monitor, rank) for rank in range(2)]
    heard(monitor, 2)
    deadline = time.monotonic() + 20
    while not (failed := monitor.failed()) and time.monotonic() < deadline:
        lines[0].send(what="beat", stopped=False)
        monitor.poll(0.05)
    assert [seen.rank for seen in failed] == [1]
    assert "rank 1 on h1 has been silent for 1.5 s" in cause_of(failed)
    for line in lines:
        line.close()


def test_a_stopped_rank_is_a_failure(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.3)
    line = agent(monitor, 0)
    heard(monitor, 1)
    deadline = time.monotonic() + 20
    while not (failed := monitor.failed()) and time.monotonic() < deadline:
        line.send(what="beat", stopped=True)
        monitor.poll(0.05)
    assert "has been stopped" in cause_of(failed)
    line.close()


def test_strangers_and_noise_are_not_listened_to(monitor: Monitor) -> None:
    stranger = agent(monitor, 0, token="guess")
    noise = socket.create_connection(("127.0.0.1", monitor.port))
    noise.sendall(b"GET / HTTP/1.1\r\n\r\n")
    friend = agent(monitor, 3)
    heard(monitor, 1)
    assert list(monitor.ranks) == [3] and monitor.failed() == []
    for end in (stranger, noise, friend):
        end.close()


def test_the_first_cause_is_the_signal(monitor: Monitor) -> None:
    lines = [agent(monitor, rank) for rank in range(3)]
    heard(monitor, 3)
    lines[1].send(what="end", status=1, tail=["lost a peer"], log="l")
    lines[2].send(what="end", status=-9, tail=[], log="l")
    lines[0].send(what="end", status=1, tail=[], log="l", by_job=True)
    deadline = time.monotonic() + 10
    while len(monitor.failed()) < 2 and time.monotonic() < deadline:
        monitor.poll(0.05)
    assert sorted(seen.rank for seen in monitor.failed()) == [1, 2]
    assert "rank 2 on h2 was ended by SIGKILL" in cause_of(monitor.failed())
    for line in lines:
        line.close()


def test_many_ranks(monitor: Monitor) -> None:
    lines = []
    for rank in range(1500):
        lines.append(agent(monitor, rank))
        monitor.poll(0)
    heard(monitor, 1500)
    for line in lines:
        line.send(what="beat", stopped=False)
    deadline = time.monotonic() + 20
    answered = 0
    while answered < 1500 and time.monotonic() < deadline:
        monitor.poll(0.05)
        answered += sum(len(line.receive() or ()) for line in lines)
    assert answered == 1500
    for line in lines:
        line.close()


def test_the_agent_of_a_rank_that_failed_stays_until_the_job_ends(monitor: Monitor, tmp_path: Path) -> None:
    """A launcher that sees it go ends the other ranks, whose ends would then be taken for the cause."""
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", TOKEN_VARIABLE: "secret"}
    report = ("--report-to", f"127.0.0.1:{monitor.port}", "--into", str(tmp_path / "logs"))
    command = (sys.executable, "-m", "mpi.supervise.agent", *report, "--", "sh", "-c", "exit 3")
    with subprocess.Popen(command, env={**os.environ, **world}) as process:
        heard(monitor, 1)
        deadline = time.monotonic() + 20
        while not monitor.failed() and time.monotonic() < deadline:
            monitor.poll(0.05)
        assert "rank 0 on " in cause_of(monitor.failed())
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        monitor.stop()
        assert process.wait(20) == 3
