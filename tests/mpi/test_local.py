"""Real workers: they end well, die, are killed, are interrupted; nothing stays behind."""

import io
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.launch.command import new_folder
from cputrain.mpi.launchers import Job
from cputrain.mpi.supervise import run
from cputrain.mpi.supervise.monitor import Monitor
from cputrain.mpi.supervise.run import run_local
from tests.support.commands import HANGS_S, PPN, cputrain, needs_two_cores
from tests.support.forked import forking_python
from tests.support.jobs import agent_process, job_of, plan_here, poll_until

pytestmark = pytest.mark.processes

SPAWN = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '300']); print('child', p.pid, flush=True); "


def job(tmp_path: Path, code: str) -> Job:
    return job_of(tmp_path, (sys.executable, "-c", code), plan_here(PPN))


def has_ended(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return True


def children(tmp_path: Path) -> list[int]:
    text = "".join(path.read_text() for path in (tmp_path / "logs").glob("rank-*.log"))
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("child ")]


def test_workers_see_their_ranks_and_are_logged(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    code = (
        "import os, sys; e = os.environ; "
        "print(e['RANK'], e['LOCAL_RANK'], e['WORLD_SIZE'], e['LOCAL_WORLD_SIZE'], e['NODE_RANK'], e['GROUP_RANK'], "
        "sorted(os.sched_getaffinity(0))); "
        "print('to stderr', file=sys.stderr)"
    )
    planned = job(tmp_path, code)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        assert run_local(planned, os.environ, out, err) == 0
    assert not [each.message for each in warned if each.category is ResourceWarning]  # python -X dev shows these
    for worker in planned.plan.workers:
        rank = worker.local_rank
        line = f"{rank} {rank} {PPN} {PPN} 0 0 {list(worker.pus)}"
        assert f"[{rank}] {line}" in out.getvalue()
        log = (tmp_path / f"logs/rank-{rank}.log").read_text()
        assert line in log and "to stderr" in log
    assert "to stderr" in err.getvalue() and "to stderr" not in out.getvalue()


@needs_two_cores
def test_a_script_that_reads_another_launcher_s_names_is_one_training(tmp_path: Path) -> None:
    """The pattern of Intel's examples, and the same for Open MPI and Slurm, with real all-reduces."""
    (tmp_path / "x.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "names = [('PMI_RANK', 'PMI_SIZE'), ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE'),\n"
        "         ('SLURM_PROCID', 'SLURM_NTASKS')]\n"
        "for number, (rank, size) in enumerate(names):\n"
        "    os.environ['RANK'] = str(os.environ.get(rank, 0))\n"
        "    os.environ['WORLD_SIZE'] = str(os.environ.get(size, 1))\n"
        "    os.environ['MASTER_PORT'] = str(port + number)\n"
        "    dist.init_process_group('gloo')\n"
        "    value = torch.tensor([float(dist.get_rank() + 1)])\n"
        "    dist.all_reduce(value)\n"
        "    print(f'{rank} {dist.get_rank()} of {dist.get_world_size()} sum {value.item()}')\n"
        "    dist.destroy_process_group()\n"
    )
    # A forked rank runs a module or a text, so the script is read.
    words = (*forking_python(), "-c", "exec(open('x.py').read())")
    result = cputrain("launch", "--ppn", "2", "--", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    expected = [f"[{i}] {name} {i} of 2 sum 3.0" for i in range(2) for name in names]
    assert sorted(result.stdout.splitlines()) == expected


def test_no_two_launches_share_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs/launch-20260102-030405"
    folders = [new_folder(folder, named=False) for _ in range(3)]
    assert [path.name.removeprefix(folder.name) for path in folders] == ["", "-2", "-3"]
    assert new_folder(tmp_path / "mine", named=True) == tmp_path / "mine"
    with pytest.raises(InputError, match="mine already exists"):
        new_folder(tmp_path / "mine", named=True)
    started = [start_launch(tmp_path) for _ in range(2)]
    assert [process.wait(timeout=HANGS_S) for process in started] == [0, 0]
    assert len(list((tmp_path / "runs").iterdir())) == 5


def start_launch(place: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "cputrain", "launch", "--", "true"], cwd=place)


@needs_two_cores
def test_no_two_processes_get_the_same_port_before_anything_listens_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PORTS_TRIED", 2)
    monkeypatch.setattr(run, "PORTS", range(9_000, 9_002))
    code = (
        "from cputrain.mpi.supervise import run; "
        "run.PORTS, run.PORTS_TRIED = range(9_000, 9_002), 2; print(run.free_port(), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        theirs = int(other.stdout.readline())
        mine = [run.free_port() for _ in range(2)]
        other.communicate("\n")
    assert {theirs, mine[0]} == {9_000, 9_001} and mine[1] not in {theirs, mine[0]}


def test_a_dying_rank_ends_the_others_and_is_named(tmp_path: Path) -> None:
    code = SPAWN + "import os, pathlib; other = os.environ['RANK'] != '1' and time.sleep(300)\n"
    code += f"while 'child' not in pathlib.Path('{tmp_path}/logs/rank-0.log').read_text(): time.sleep(0.05)\n"
    code += "print('the reason'); sys.exit(7)"
    started = time.monotonic()
    with pytest.raises(RunError, match=r"rank 1 on \S+ exited with status 7; log \S+rank-1.log") as failure:
        run_local(job(tmp_path, code), os.environ, io.StringIO(), io.StringIO())
    assert time.monotonic() - started < 240  # the other ranks sleep for 300
    assert "| the reason" in str(failure.value)
    assert all(has_ended(pid) for pid in children(tmp_path)) and len(children(tmp_path)) == 2


@needs_two_cores
def test_a_killed_rank_is_named_with_its_signal_and_stubborn_peers_end_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "FAILURE_GRACE_S", 0.5)
    code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(0.5); "
    code += "os.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '1' else time.sleep(300)"
    started = time.monotonic()
    with pytest.raises(RunError, match=r"rank 1 on \S+ was ended by SIGKILL"):
        run_local(job(tmp_path, code), os.environ, io.StringIO(), io.StringIO())
    assert time.monotonic() - started < 240  # the other ranks sleep for 300


def test_ranks_that_refuse_their_input_make_status_2(tmp_path: Path) -> None:
    assert run_local(job(tmp_path, "import sys; sys.exit(2)"), os.environ, io.StringIO(), io.StringIO()) == 2


def test_a_command_that_is_not_there_is_refused(tmp_path: Path) -> None:
    err = io.StringIO()
    planned = job(tmp_path, "")
    wrong = replace(planned, command=("no-such-program",))
    assert run_local(wrong, os.environ, io.StringIO(), err) == 2
    assert "cannot start 'no-such-program'" in err.getvalue()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(tmp_path: Path, number: signal.Signals) -> None:
    argv = [sys.executable, "-m", "cputrain", "launch", "--ppn", str(PPN), "--output", "out", "--"]
    process = subprocess.Popen(
        [*argv, sys.executable, "-c", SPAWN + "time.sleep(300)"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in this_machine().allowed_cores[:PPN]:
        assert "child" in process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"({number.name})" in err
    started = children(tmp_path / "out")
    assert started and all(has_ended(pid) for pid in started)


# A rank as shells start it, its child, and one that has left its session; each prints its number.
FAMILY = "echo child $$; sh -c 'echo child $$; sleep 300; :' & setsid sh -c 'echo child $$; sleep 300; :' & wait; :"


def wait_until_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not all(has_ended(pid) for pid in pids):
        time.sleep(0.05)
    assert all(has_ended(pid) for pid in pids)


def kill_with_families(process: subprocess.Popen[str], ranks: int) -> None:
    """Kill a parent of ranks that run FAMILY; fail unless all their processes end."""
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(3 * ranks)]
    process.kill()
    process.wait()
    wait_until_ended(pids)
    process.stdout.close()


def test_a_killed_launcher_takes_its_workers_and_their_children_along(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "cputrain", "launch", "--ppn", str(PPN), "--output", "out", "--", "sh", "-c", FAMILY]
    process = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    kill_with_families(process, PPN)


def test_a_killed_agent_takes_its_rank_and_its_children_along(tmp_path: Path) -> None:
    monitor = Monitor("secret", ("h0",))
    process = agent_process(monitor, tmp_path / "logs", "sh", "-c", FAMILY, stdout=subprocess.PIPE)
    poll_until(monitor, lambda: monitor.ranks)  # the rank starts when its Hello is answered
    kill_with_families(process, 1)
    monitor.close()


def test_what_a_finished_rank_has_put_into_a_session_of_its_own_goes_on(tmp_path: Path) -> None:
    """A program that uploads results, say; it ends with a job that fails."""
    for status in (0, 3):
        started = f"setsid sh -c 'echo child $$; exec sleep 300' > child{status} 2>&1"
        code = f"{started} & until [ -s child{status} ]; do sleep 0.1; done; exit {status}"
        argv = [sys.executable, "-m", "cputrain", "launch", "--ppn", "1", "--output", f"out{status}", "--", "sh", "-c"]
        done = subprocess.run([*argv, code], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S)
        assert done.returncode == bool(status)
        pid = int((tmp_path / f"child{status}").read_text().split()[1])
        assert has_ended(pid) == bool(status)
        if not status:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("save_first", [False, True])
def test_a_stop_has_its_status_where_its_line_cannot_be_shown(tmp_path: Path, *, save_first: bool) -> None:
    """As after the end of the terminal; /dev/full stands for it."""
    code = """
import os, signal, time
signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(0))
if os.environ["RANK"] == "0":
    os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    with Path("/dev/full").open("w", encoding="utf-8", buffering=1) as err:
        status = run_local(job(tmp_path, code), os.environ, io.StringIO(), err, save_first=save_first)
    assert status == 128 + signal.SIGTERM
