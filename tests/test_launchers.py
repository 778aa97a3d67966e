"""Real launchers: every rank tells who it is and which PUs the kernel gave it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from affinity.plan import Request, plan_machine
from affinity.runtime import Runtime
from affinity.sysfs import this_machine
from mpi.cluster import Kind, job_plan_json
from mpi.job import Job
from mpi.launch import bound, start
from mpi.launcher import find_launcher
from tests.conftest import mpi_path

CORES = len(this_machine().allowed_cores)
WORKERS = min(2, CORES)
ASKED = Request(ppn=WORKERS)
TELL = (
    "import os, json; from mpi.rank import discover; rank = discover(os.environ); "
    "os.write(1, json.dumps([rank.rank, rank.world_size, rank.local_rank, sorted(os.sched_getaffinity(0)), "
    "os.environ['OMP_NUM_THREADS'], os.environ['MASTER_ADDR'], os.environ.get('GREETING')]).encode() + b'\\n')"
)
MPI = ("intelmpi", "openmpi", "openmpi4", "mpich")


def ran(
    name: str, folder: Path, binder: str, command: tuple[str, ...], request: Request = ASKED
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **mpi_path(name)}
    plan = plan_machine(this_machine(), request, Runtime())
    job = Job(
        kinds=(Kind(hosts=("localhost",), plan=plan),),
        command=command,
        plan_path=folder / "plan.json",
        log_dir=folder / "logs",
        binder=binder,
        variables=(("GREETING", "good morning, 'you'"),),
    )
    launcher = find_launcher(name.removesuffix("4"), env)
    assert launcher.version[:1] == {"intelmpi": (2021,), "openmpi": (5,), "openmpi4": (4,), "mpich": (5,)}[name]
    made = start(job, launcher, bound(job), folder)
    job.plan_path.write_text(job_plan_json(job.kinds))
    for path, text in made.files:
        path.write_text(text)
    return subprocess.run(made.argv, env={**env, **dict(made.variables)}, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("binder", ["self", "launcher"])
@pytest.mark.parametrize("name", MPI)
def test_each_rank_has_its_pus(name: str, binder: str, tmp_path: Path) -> None:
    result = ran(name, tmp_path, binder, (sys.executable, "-c", TELL))
    assert result.returncode == 0, result.stderr
    said = sorted(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))
    plan = plan_machine(this_machine(), Request(ppn=WORKERS), Runtime())
    assert said == [
        [i, WORKERS, i, list(worker.pus), str(worker.intra_op), "127.0.0.1", "good morning, 'you'"]
        for i, worker in enumerate(plan.workers)
    ]


@pytest.mark.parametrize("name", MPI)
def test_more_ranks_than_cores_have_the_shared_cores_of_the_plan(name: str, tmp_path: Path) -> None:
    request = Request(ppn=CORES + 1, oversubscribe=True)
    result = ran(name, tmp_path, "self", (sys.executable, "-c", TELL), request)
    assert result.returncode == 0, result.stderr
    said = sorted(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))
    assert [(one[0], one[3]) for one in said] == [
        (i, list(worker.pus)) for i, worker in enumerate(plan_machine(this_machine(), request, Runtime()).workers)
    ]


@pytest.mark.parametrize("name", MPI)
def test_a_launcher_s_wrong_binding_is_told(name: str, tmp_path: Path) -> None:
    """Bound by nobody, though the plan says that the launcher binds: both masks are named."""
    if WORKERS < 2:
        pytest.skip(reason="needs two cores")
    env = {**os.environ, **mpi_path(name)}
    plan = plan_machine(this_machine(), Request(ppn=WORKERS), Runtime())
    job = Job(
        kinds=(Kind(hosts=("localhost",), plan=plan),),
        command=("true",),
        plan_path=tmp_path / "plan.json",
        log_dir=tmp_path / "logs",
    )
    launcher = find_launcher(name.removesuffix("4"), env)
    made = start(job, launcher, bound(Job(**{**fields(job), "binder": "launcher"})), tmp_path)
    job.plan_path.write_text(job_plan_json(job.kinds))
    for path, text in made.files:
        path.write_text(text)
    result = subprocess.run(made.argv, env={**env, **dict(made.variables)}, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert "the launcher bound PUs 0-1 (mask 0x3), planned" in result.stderr


def fields(job: Job) -> dict:
    return {name: getattr(job, name) for name in ("kinds", "command", "plan_path", "log_dir")}


@pytest.mark.parametrize("name", MPI)
def test_a_written_launch_script_runs_as_it_is(name: str, tmp_path: Path) -> None:
    """plan --write, then launch.sh from another folder, with a path that needs quotes."""
    env = {**os.environ, **mpi_path(name)}
    # Not this environment's whole bin/: it may have an mpirun, too.
    python = tmp_path / "alone/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    env["PATH"] = f"{python.parent}:{env['PATH']}"
    if name == "openmpi4":
        env["PATH"] = f"{link_first(tmp_path)}:{env['PATH']}"
    folder = tmp_path / "it's a job"
    kind = name.removesuffix("4")
    argv = [sys.executable, "-m", "cputrain", "plan", "--ppn", str(WORKERS), "--hosts", "localhost"]
    written = subprocess.run([*argv, "--launcher", kind, "--write", folder], env=env, capture_output=True, text=True)
    assert written.returncode == 0, written.stderr
    assert {"plan.json", "plan.svg", "hosts", "launch.sh"} <= {path.name for path in folder.iterdir()}
    checker = Path(sys.executable).with_name("shellcheck")
    assert subprocess.run([checker, folder / "launch.sh"], capture_output=True).returncode == 0
    script = [folder / "launch.sh", "python", "-c", TELL]
    result = subprocess.run(script, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    said = sorted(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))
    assert [(line[0], line[3]) for line in said] == [
        (i, list(worker.pus))
        for i, worker in enumerate(plan_machine(this_machine(), Request(ppn=WORKERS), Runtime()).workers)
    ]


def link_first(folder: Path) -> Path:
    """A folder with the system's mpirun, to stand before this Python's on PATH."""
    (folder / "bin").mkdir()
    (folder / "bin/mpirun").symlink_to("/usr/bin/mpirun.openmpi")
    return folder / "bin"
