"""The checks before a job: of made-up reports, and of real hosts that are network namespaces."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.planner.workload import RESNET50
from cputrain.mpi import preflight
from cputrain.mpi.preflight import (
    MAX_BYTES,
    Clock,
    HostReport,
    LinkPeer,
    LinkSpeed,
    Listening,
    compare_hosts,
    inspect_host,
    missing_provider,
    offered_providers,
)
from cputrain.mpi.supervise.processes import JobFailedError
from cputrain.mpi.supervise.signals import StopSignals
from cputrain.mpi.supervise.wire import Hello, RankServer, Stop, connect
from tests.mpi.test_remote import launch_on
from tests.support.commands import HANGS_S
from tests.support.fake_hosts import fake_hosts
from tests.support.machines import build_machine

PLAN = plan_machine(build_machine(1, 1, 4, 1), Request(ppn=2, workload=RESNET50, local_batch=4), Runtime())
HOST = HostReport(
    host="h1",
    python="3.11.7",
    packages=(("torch", "2.13.0"),),
    files=(("/x/train.py", "aa"),),
    clock_s=0.0,
    memory_bytes=64 << 30,
    scratch_bytes=64 << 30,
    allowed_pus=(0, 1, 2, 3),
    link_gbit=10.0,
)


def findings_with(**changes: object) -> tuple[list[str], list[str]]:
    """Errors and warnings about four equal hosts, the third of which is changed."""
    reports = [replace(HOST, host=f"h{i}") for i in (1, 2, 3, 4)]
    reports[2] = replace(reports[2], **changes)
    findings = compare_hosts(reports, {report.host: PLAN for report in reports})
    return findings.errors, findings.warnings


def test_equal_hosts_pass() -> None:
    assert findings_with() == ([], [])


@pytest.mark.parametrize(
    ("changes", "error", "warning"),
    [
        ({"packages": (("torch", "2.8.0"),)}, "h3 has torch 2.8.0, most hosts have 2.13.0", ""),
        ({"packages": ()}, "h3 has torch none", ""),
        ({"python": "3.12.1"}, "h3 has Python 3.12.1", ""),
        ({"files": (("/x/train.py", "bb"),)}, "h3 has /x/train.py bb, most hosts have aa", ""),
        ({"allowed_pus": (0, 1)}, "h3 does not allow CPUs 2-3", ""),
        ({"memory_bytes": 1 << 30}, "h3 has 1.0 GiB of memory free", ""),
        ({"clock_s": -7.25}, "", "h3's clock is -7.2 s off"),
        ({"scratch_bytes": 0}, "", "h3 has 0.0 GiB free in its temporary folder"),
        ({"link_gbit": 1.0}, "", "h3 sends 1.00 Gbit/s"),
        ({"no_provider": "psm3"}, "", "h3's libfabric has no provider psm3"),
    ],
)
def test_a_host_that_differs_is_named(changes: dict, error: str, warning: str) -> None:
    errors, warnings = findings_with(**changes)
    assert len(errors) == bool(error) and all(error in line for line in errors)
    assert len(warnings) == bool(warning) and all(warning in line for line in warnings)


def test_programs_are_compared_by_content_and_data_by_size(tmp_path: Path) -> None:
    """A command may name terabytes of data."""
    program, data = tmp_path / "train.py", tmp_path / "images.tar"
    program.write_text("print()")
    with data.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    named = (str(program), str(data), str(tmp_path / "elsewhere"))
    report = inspect_host(named, ("pytest", "no-such-package"), build_machine(1, 1, 2, 1), time.time(), None)
    content = hashlib.sha256(b"print()").hexdigest()[:12]
    assert [found for _, found in report.files] == [content, f"{MAX_BYTES + 1:,} bytes", "absent"]
    assert report.packages == (("pytest", pytest.__version__),)


@pytest.mark.long
def test_hosts_are_checked_before_a_job(tmp_path: Path) -> None:
    """Three equal hosts; then one with a slow cable; then one that does not answer at all."""
    with fake_hosts(tmp_path / "hosts", 3) as hosts:

        def launched(name: str, *options: str) -> subprocess.CompletedProcess[str]:
            argv = launch_on(
                hosts, "openmpi4", *options, "--", sys.executable, "-c", "print('ran')", cwd=tmp_path / name
            )
            return subprocess.run(argv, capture_output=True, text=True, timeout=HANGS_S)

        good = launched("a")
        assert good.returncode == 0 and good.stdout.count("ran") == 3 * 2, good.stderr
        assert "pre-flight: 3 hosts checked in" in good.stderr
        hosts.slow_down("h2", "10mbit")  # slower than any other, however busy this machine is
        slow = launched("b")
        assert slow.returncode == 0
        assert "pre-flight: h2 sends 0.0" in slow.stderr, slow.stderr
        hosts.cut("h3")
        lost = launched("c")
        assert lost.returncode == 1 and "ran" not in lost.stdout
        assert "no answer from h3" in lost.stderr, lost.stderr


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 7, 64])
def test_every_host_sends_once_and_never_while_it_receives(hosts: int) -> None:
    turns = preflight.sending_turns(hosts)
    assert sorted(rank for turn in turns for rank in turn) == list(range(hosts))
    for turn in turns:
        assert hosts == 1 or not {(rank + 1) % hosts for rank in turn} & set(turn)


@pytest.fixture
def server() -> Iterator[RankServer]:
    server = RankServer("secret", ("localhost",) * 3, "127.0.0.1", (HostReport, Listening, LinkSpeed))
    yield server
    server.close()


def answer_as_hosts(port: int, hosts: Sequence[int], clock: SimpleNamespace) -> None:
    """The answers of some hosts, one host after the other, each after most of the time that they have; then time goes
    on until the end."""
    connections = []
    for host in hosts:
        clock.now += 0.8 * preflight.PATIENCE_S
        connection = connect(f"127.0.0.1:{port}", "secret", (Clock, LinkPeer, Stop))
        connections.append(connection)
        connection.send(Hello(rank=host, host="localhost"))
        assert connection.wait(time.monotonic() + HANGS_S), "the answer has been taken"
        connection.send(replace(HOST, host="localhost"))
        connection.send(Listening(address="127.0.0.1", port=1))
    for connection in connections:
        connection.send(LinkSpeed(gbit=1.0))
    while any(connection.receive() is not None for connection in connections):
        clock.now += 1.0 if len(hosts) < 3 else 0.0
        time.sleep(0.05)


@pytest.mark.parametrize(("hosts", "missing"), [((0, 1, 2), None), ((0, 2), "no answer from localhost")])
def test_hosts_may_be_slow_as_long_as_answers_arrive(
    hosts: tuple[int, ...], missing: str | None, server: RankServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answers within the time that they have without an answer, all of them together after it."""
    clock = SimpleNamespace(now=0.0, time=time.time, monotonic=lambda: clock.now)
    monkeypatch.setattr(preflight, "time", clock)
    answers = threading.Thread(target=answer_as_hosts, args=(server.port, hosts, clock), daemon=True)
    with subprocess.Popen(["sleep", "60"]) as launcher:
        answers.start()
        try:
            if missing is None:
                assert len(preflight._collect(server, ("localhost",) * 3, launcher, StopSignals())) == 3
            else:
                with pytest.raises(JobFailedError, match=missing):
                    preflight._collect(server, ("localhost",) * 3, launcher, StopSignals())
        finally:
            launcher.kill()
    server.close()
    answers.join(timeout=10)


def test_a_host_that_dies_before_its_turn_is_named_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """n0 and n2 send first, and cannot finish: the launcher has ended, as n1 is gone."""
    names = ("n0", "n1", "n2", "n3")
    server = RankServer("secret", names, "127.0.0.1", (HostReport, Listening, LinkSpeed))
    monkeypatch.setattr(preflight, "unreachable_hosts", lambda hosts: [host for host in hosts if host == "n1"])
    connections = []
    for rank, name in enumerate(names):
        connection = connect(f"127.0.0.1:{server.port}", "secret", (Clock, LinkPeer, Stop))
        connections.append(connection)
        connection.send(Hello(rank=rank, host=name))
        connection.send(replace(HOST, host=name))
        connection.send(Listening(address="127.0.0.1", port=1))
    with (
        subprocess.Popen(["sleep", "2"]) as launcher,
        pytest.raises(JobFailedError, match="no answer from n1:") as failed,
    ):
        preflight._collect(server, names, launcher, StopSignals())
    assert failed.value.hosts == ("n1",)
    server.close()


@pytest.mark.parametrize(
    "first",
    [
        "#!/bin/sh\nexit 127",
        "#!/bin/sh\nexit 0",  # Intel MPI's, where a wrapper hides that it fails
        "#!/bin/sh\necho psm3:; exit 1",
        "#!/bin/sh\necho 'usage: fi_info [OPTIONS]'",
        "#!/nowhere/sh\n",
        "not a program",
        "#!/bin/sh\nexec sleep 600",
    ],
)
def test_a_fi_info_that_fails_or_lists_nothing_is_passed_over(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Intel MPI's, first on the PATH of an activated environment, calls a program that PyPI's package lacks."""
    monkeypatch.setattr(preflight, "FI_INFO_S", 0.4)
    for name, script in (("first", first), ("second", "#!/bin/sh\necho tcp:; echo '    version: 117.0'\n")):
        program = tmp_path / name / "fi_info"
        program.parent.mkdir()
        program.write_text(script)
        program.chmod(0o755)
    assert offered_providers((str(tmp_path / "first"), str(tmp_path / "second"))) == {"tcp"}
    assert offered_providers((str(tmp_path / "first"), str(tmp_path))) == frozenset()


def test_a_provider_is_missing_only_if_others_are_known() -> None:
    known = frozenset({"tcp", "shm"})
    assert missing_provider("tcp", known) is None and missing_provider("tcp;shm", known) is None
    assert missing_provider("tcp;mlx", known) == "mlx" and missing_provider("psm3,tcp", known) == "psm3"
    assert missing_provider("^mlx", known) is None and missing_provider(None, known) is None
    assert missing_provider("psm3", frozenset()) is None


def test_a_missing_provider_is_found_by_the_real_fi_info() -> None:
    if not (offered := offered_providers(os.get_exec_path())):
        pytest.skip(reason="needs the system package libfabric-bin (fi_info)")
    assert missing_provider("tcp;shm", offered) is None and missing_provider("tcp;mlx", offered) == "mlx"
