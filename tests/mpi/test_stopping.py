"""How jobs stop: time to save, a second signal, suspension, and outputs that nobody reads. Under every launcher, and
without one; jobs run side by side, as they mostly wait."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from cputrain.mpi.supervise import ranks, signals
from cputrain.mpi.supervise.activity import process_tree
from cputrain.mpi.supervise.signals import InterruptedBySignalError, StopSignals, stop_signals
from cputrain.mpi.supervise.wire import HEARTBEAT_TIMEOUT_S
from tests.mpi.test_local import wait_until_ended
from tests.support.commands import HANGS_S, PPN, PYTHON, mpi_path

STARTERS = ("local", "openmpi", "mpich", "intelmpi")
RARELY = pytest.param(STARTERS, marks=(pytest.mark.long, pytest.mark.nightly), id="all")
SAVES = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(5)  # longer than ranks have after a failure
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(300)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(300)
"""
WAITS = "import time; print('up', flush=True); time.sleep({}); print('done', flush=True)"


def without_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def launched(stack: ExitStack, name: str, place: Path, code: str, **pipes: int) -> subprocess.Popen[str]:
    """`cputrain launch` of PPN ranks that run a program, all of which have printed their first line."""
    env = {**os.environ, **({} if name == "local" else mpi_path(name))}
    command = (sys.executable, "-m", "cputrain", "launch", "--launcher", name, "--ppn", str(PPN))
    argv = (*command, "--output", name, "--", sys.executable, "-c", code)
    all_pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
    process = stack.enter_context(
        subprocess.Popen(argv, cwd=place, env=env, text=True, preexec_fn=without_nohup, **all_pipes)  # noqa: PLW1509
    )
    stack.callback(lambda: process.kill() if process.poll() is None else None)
    return process


def await_first_lines(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        for _ in range(PPN):
            assert process.stdout.readline().endswith("up\n")


@pytest.mark.parametrize("starters", [("local", "openmpi", "intelmpi"), RARELY])
def test_ranks_have_time_to_save_when_the_job_is_told_to_stop(tmp_path: Path, starters: tuple[str, ...]) -> None:
    """By a batch system, or because its terminal is closed."""
    sent = dict(zip(STARTERS, (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGTERM), strict=True))
    with ExitStack() as stack:
        jobs = {name: launched(stack, name, tmp_path, SAVES) for name in starters}
        await_first_lines(list(jobs.values()))
        for name, job in jobs.items():
            job.send_signal(sent[name])
        for name, job in jobs.items():
            _, err = job.communicate(timeout=HANGS_S)
            assert job.returncode == 128 + sent[name] and f"({sent[name].name}) within {signals.SAVE_S:g} s" in err
            logs = [(tmp_path / name / f"logs/rank-{rank}.log").read_text() for rank in range(PPN)]
            assert logs == ["up\nsaved\n"] * PPN, name


@pytest.mark.parametrize("starters", [("local", "openmpi", "mpich"), RARELY])
def test_a_second_signal_ends_the_job_at_once_and_nothing_is_a_bug(tmp_path: Path, starters: tuple[str, ...]) -> None:
    with ExitStack() as stack:
        errors = {name: stack.enter_context((tmp_path / f"{name}.err").open("w+")) for name in starters}
        jobs = {name: launched(stack, name, tmp_path, STUBBORN, stderr=errors[name].fileno()) for name in starters}
        await_first_lines(list(jobs.values()))
        ranks = [pid for job in jobs.values() for pid in process_tree(job.pid)]
        for job in jobs.values():
            job.send_signal(signal.SIGTERM)
        for name, job in jobs.items():  # one that has not taken the first signal yet would see both as one
            while "(SIGTERM)" not in (tmp_path / f"{name}.err").read_text():
                assert job.poll() is None
                time.sleep(0.05)
        stopped = time.monotonic()
        for job in jobs.values():
            job.send_signal(signal.SIGTERM)
        for name, job in jobs.items():
            job.communicate(timeout=HANGS_S)
            err = (tmp_path / f"{name}.err").read_text()
            assert job.returncode == 143 and "Traceback" not in err, f"{name}: {err}"
        assert time.monotonic() - stopped < 60, "not the time that ranks have to save"
        wait_until_ended(ranks)


def test_two_signals_to_mpirun_end_ranks_of_launch_without_a_traceback(tmp_path: Path) -> None:
    argv = ("mpirun", "-n", str(PPN), sys.executable, "-m", "cputrain", "launch", "--", sys.executable, "-c")
    # In one write, as mpirun passes on what it gets from both ranks, and PYTHONUNBUFFERED splits a print.
    code = "import os, time; os.write(1, b'up\\n'); time.sleep(300)"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        (*argv, code), cwd=tmp_path, env={**os.environ, **mpi_path("mpich")}, stdout=pipe, stderr=pipe, text=True
    ) as process:
        await_first_lines([process])
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        _, err = process.communicate(timeout=HANGS_S)
    assert process.returncode != 0 and "Traceback" not in err


def test_a_stop_signal_raises_once_and_the_next_one_ends_at_once() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals() as signals:
        signals.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.again  # what does not check ends at once
        with pytest.raises(InterruptedBySignalError, match=str(int(signal.SIGTERM))):
            signals.check()
        signals.check()
        assert not signals.again
        os.kill(os.getpid(), signal.SIGINT)
        signals.check()
        assert signals.again
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_to_launcher_and_rank_together_is_a_stop_and_no_failure(tmp_path: Path) -> None:
    """As schedulers send it."""
    code = "import os, time; print('up', os.getpid(), flush=True); time.sleep(60)"
    argv = (sys.executable, "-m", "cputrain", "launch", "--ppn", "1", "--", sys.executable, "-c", code)
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as launcher:
        assert launcher.stdout is not None
        rank = int(launcher.stdout.readline().split()[-1])
        for pid, number in (
            (launcher.pid, signal.SIGSTOP),  # so that it gets both at once, however late this process sends the second
            (rank, signal.SIGTERM),
            (launcher.pid, signal.SIGTERM),
            (launcher.pid, signal.SIGCONT),
        ):
            os.kill(pid, number)
        _, err = launcher.communicate(timeout=HANGS_S)
    assert launcher.returncode == 128 + signal.SIGTERM and "was ended by" not in err, err


def test_a_hangup_after_another_stop_signal_ends_nothing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As systemd ends a session: SIGTERM, and SIGHUP right after it."""
    monkeypatch.setattr(signal, "getsignal", lambda _number: signal.SIG_DFL)  # as without nohup
    first: list[int] = []
    with StopSignals(first_stop=first.append) as signals:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGHUP):
            signal.raise_signal(number)
        assert first == [signal.SIGTERM] and not signals.again
        signal.raise_signal(signal.SIGTERM)
        assert first == [signal.SIGTERM] and signals.again
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(InterruptedBySignalError):
            signals.check()
        signal.raise_signal(signal.SIGHUP)
        assert not signals.again


@pytest.mark.long
def test_a_job_that_is_suspended_as_a_whole_goes_on(tmp_path: Path) -> None:
    """For longer than any silence may last: launchers, agents, ranks are stopped, and go on one after another."""
    away_s = HEARTBEAT_TIMEOUT_S + 3
    with ExitStack() as stack:
        jobs = {name: launched(stack, name, tmp_path, WAITS.format(away_s + 8)) for name in STARTERS}
        await_first_lines(list(jobs.values()))
        processes = [pid for job in jobs.values() for pid in process_tree(job.pid)]
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(away_s)
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)
        for name, job in jobs.items():
            out, err = job.communicate(timeout=HANGS_S)
            assert job.returncode == 0 and out.count("done\n") == PPN, f"{name}: {err}"


@pytest.mark.long
def test_a_job_goes_on_where_nobody_reads_its_output(tmp_path: Path) -> None:
    """`| head`, a full disk, an output that was closed before the start."""
    code = "import time; print('one', flush=True); time.sleep(1.5); print('two', flush=True); print(3 * 'x' * 99999)"
    with ExitStack() as stack:
        jobs = {}
        for name in ("local", "mpich"):
            folder = tmp_path / name
            folder.mkdir()
            full = stack.enter_context(Path("/dev/full").open("w", encoding="utf-8"))
            jobs[name, "full"] = launched(stack, name, folder, code, stdout=full.fileno())
            (folder / "head").mkdir()
            jobs[name, "head"] = head = launched(stack, name, folder / "head", code)
        for head in (jobs["local", "head"], jobs["mpich", "head"]):
            assert head.stdout.readline().endswith("one\n")
            head.stdout.close()
        for (name, how), job in jobs.items():
            err = job.stderr.read()
            assert job.wait(HANGS_S) == 0, err
            why = {"full": "No space left on device", "head": "Broken pipe"}[how]
            assert f"cputrain: stdout: {why}; the job continues, and its output is in " in err
            logs = tmp_path / name / ("head" if how == "head" else "") / name / "logs"
            assert all((logs / f"rank-{rank}.log").read_text().startswith("one\ntwo\nxxx") for rank in range(PPN))
    (tmp_path / "closed").mkdir()
    closed = f"{PYTHON} -m cputrain launch --output out -- echo one >&-"
    done = subprocess.run(("sh", "-c", closed), cwd=tmp_path / "closed", stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "closed/out/logs/rank-0.log").read_text() == "one\n"


def test_a_command_whose_output_nobody_takes_ends_and_says_why() -> None:
    argv = (sys.executable, "-m", "cputrain", "plan", "--machine", "skx-8160-2s", "--explain")
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "cputrain: stdout: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, ""), "as other programs end at SIGPIPE"


def test_a_job_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


HANDLES_LATE = """
import signal, sys, time
time.sleep(1)
signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(7))
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "patience_s", "status"), [(HANDLES_LATE, 30.0, 7), ("time.sleep(60)", 0.5, -signal.SIGUSR1)]
)
def test_a_preemption_waits_until_a_rank_can_take_it(
    code: str, patience_s: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a program that only starts the signal would be the end; one that never takes it gets it in the end."""
    monkeypatch.setattr(ranks, "PREEMPT_S", patience_s)
    with (tmp_path / "out").open("w") as out:
        supervisor = ranks.RankSupervisor(tmp_path / "logs", out, out)
        try:
            supervisor.start(0, (sys.executable, "-c", f"import time\n{code}"), os.environ, label="")
            supervisor.preempt()
            deadline = time.monotonic() + 60
            while not supervisor.all_exited and time.monotonic() < deadline:
                supervisor.poll(0.05)
            assert supervisor.ranks[0].process.returncode == status, (tmp_path / "out").read_text()
        finally:
            supervisor.stop(0.1)
            supervisor.close()
