"""Jobs through real launchers: on this host, and on four hosts that are network namespaces."""

import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.mpi.launch_command import find_launcher
from cputrain.mpi.supervise import monitor
from cputrain.mpi.supervise.processes import JobFailedError
from cputrain.mpi.supervise.run import run_remote
from cputrain.report.run import read_usage
from cputrain.runs.events import read_events
from tests.support.commands import HANGS_S, PPN, cputrain, here, launchers, mpi_path, needs_two_cores
from tests.support.fake_hosts import FakeHosts, fake_hosts
from tests.support.images import write_images
from tests.support.jobs import job_of, plan_here
from tests.support.trainings import LENET

MPI = ("intelmpi", "openmpi", "openmpi4", "mpich")
OWN = 100_000_000 + os.getpid()  # seconds of sleep, by which this run's processes are known among those of others
ALL_REDUCE = """
import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
rank, ranks = dist.get_rank(), dist.get_world_size()
line = f"rank {rank} on {socket.gethostname()} of {ranks} sum {value.item()}\\n"
os.write(1, line.encode())  # at once: the lines of two ranks may not mix
dist.barrier()
dist.destroy_process_group()
"""


# The same without torch, whose import takes seconds in each of eight ranks: through a socket of rank 0.
SUM = """
import os, socket, time
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place, total = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), float(rank + 1)
if rank == 0:
    with socket.create_server(place) as server:
        peers = [server.accept()[0] for _ in range(ranks - 1)]
    total += sum(float(peer.recv(99)) for peer in peers)
    for peer in peers:
        peer.sendall(str(total).encode())
else:
    peer = None
    while peer is None:
        try:
            peer = socket.create_connection(place)
        except ConnectionRefusedError:
            time.sleep(0.1)
    peer.sendall(str(total).encode())
    total = float(peer.recv(99))
os.write(1, f"rank {rank} on {socket.gethostname()} of {ranks} sum {total}\\n".encode())
"""


def launch(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    options = ("--launcher", name.removesuffix("4"), "--ppn", str(PPN), "--output", "out")
    return cputrain("launch", *options, *arguments, cwd=cwd, **mpi_path(name))


@pytest.mark.parametrize("name", launchers("mpich"))
def test_a_rank_s_death_ends_the_job_and_is_named(name: str, tmp_path: Path) -> None:
    code = (
        f"import os, signal, subprocess, time; p = subprocess.Popen(['sleep', '{OWN}']); "
        "print('about to', flush=True); "
        f"os.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '{PPN - 1}' else time.sleep(300)"
    )
    started = time.monotonic()
    result = launch(name, "--", sys.executable, "-c", code, cwd=tmp_path)
    assert time.monotonic() - started < 240  # the other ranks sleep for 300
    assert result.returncode == 1
    assert f"rank {PPN - 1} on " in result.stderr and "was ended by SIGKILL" in result.stderr
    assert "  | about to" in result.stderr
    assert subprocess.run(["pgrep", "-f", f"sleep {OWN}"], capture_output=True).returncode == 1  # nothing is left


@pytest.mark.parametrize("name", launchers("intelmpi", "openmpi4"))
def test_ranks_that_refuse_their_input_make_status_2(name: str, tmp_path: Path) -> None:
    refused = launch(name, "--", "sh", "-c", "echo no such option >&2; exit 2", cwd=tmp_path)
    assert refused.returncode == 2
    assert "cputrain: rank " in refused.stderr and "exited with status 2; log " in refused.stderr


@pytest.mark.parametrize("name", ["intelmpi", "mpich"])
def test_more_arguments_than_hydra_takes_arrive_as_given(name: str, tmp_path: Path) -> None:
    """Hydra's tables have 1,000 entries; the last argument is not UTF-8 and longer than one piece of JSON."""
    words = [*("a b", 'c"d', "$e", "--", ""), *map(str, range(1500)), "\udce9" * 60_000]
    code = "import hashlib, os, sys; print(hashlib.sha256(b'/'.join(map(os.fsencode, sys.argv[1:]))).hexdigest())"
    result = launch(name, "--", sys.executable, "-c", code, *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    digest = hashlib.sha256(b"/".join(map(os.fsencode, words))).hexdigest()
    assert sorted(line.partition("] ")[2] for line in result.stdout.splitlines()) == [digest] * PPN


@pytest.mark.slow
@needs_two_cores
def test_an_agent_that_a_signal_stops_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a host is preempted alone; the rank that is left would go on."""
    monkeypatch.setattr(monitor, "ALONE_S", 1.0)
    env = {**os.environ, **mpi_path("intelmpi")}
    code = f"[ $RANK != {PPN - 1} ] || kill -TERM $PPID; exec sleep 300"
    place = f"rank {PPN - 1} on {socket.gethostname()}"
    alone = f"the agent of {place} was stopped by SIGTERM, while other ranks kept running; {place} "
    with pytest.raises(JobFailedError, match=re.escape(alone)) as failed:
        run_remote(job_of(tmp_path, ("sh", "-c", code), plan_here(PPN)), find_launcher("intelmpi", env), tmp_path, env)
    assert "was ended by SIGTERM" in str(failed.value)


def test_a_launcher_that_does_not_end_after_its_ranks_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the connection to a host is lost in the last second."""
    path = mpi_path("mpich")["PATH"]
    mpirun = tmp_path / "bin/mpirun"
    mpirun.parent.mkdir()
    real = shutil.which("mpirun", path=path)
    mpirun.write_text(f'#!/bin/sh\n{real} "$@"\ncase "$*" in *agent*) exec sleep {OWN};; esac\n')
    mpirun.chmod(0o755)
    env = {**os.environ, "PATH": f"{mpirun.parent}:{path}"}
    installed = replace(find_launcher("mpich", env), program=str(mpirun))
    monkeypatch.setattr("cputrain.mpi.supervise.run.LAUNCHER_END_S", 0.5)
    assert run_remote(job_of(tmp_path, ("true",), plan_here(1)), installed, tmp_path, env) == 0
    assert "was stopped, as it had not exited 0.5 s after all ranks" in caplog.text
    assert subprocess.run(["pgrep", "-f", f"sleep {OWN}"], capture_output=True).returncode == 1


def test_torchrun_starts_agents_too(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    code = "import os; print('rank', os.environ['RANK'], flush=True)"
    launch_ = ("launch", "--launcher", "torchrun", "--ppn", str(PPN), "--output", "out", "--")
    result = cputrain(*launch_, sys.executable, "-c", code, cwd=tmp_path, PATH=path)
    assert result.returncode == 0, result.stderr
    assert {line.split("] ")[1] for line in result.stdout.splitlines()} == {f"rank {i}" for i in range(PPN)}
    refused = here("launch", "--launcher", "torchrun", "--hosts", "a,b", "--", "true", cwd=tmp_path, PATH=path)
    assert refused.returncode == 2 and "on every host" in refused.stderr


def test_a_signal_ends_everything(tmp_path: Path) -> None:
    env = {**os.environ, **mpi_path("openmpi4")}
    options = ("--launcher", "openmpi", "--ppn", str(PPN), "--output", "out")
    argv = [sys.executable, "-m", "cputrain", "launch", *options, "--"]
    code = f"import subprocess, time; p = subprocess.Popen(['sleep', '{OWN}']); "
    code += "print('up', flush=True); time.sleep(300)"
    with subprocess.Popen(
        [*argv, sys.executable, "-c", code], cwd=tmp_path, env=env, stdout=subprocess.PIPE
    ) as process:
        for _ in range(PPN):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    assert subprocess.run(["pgrep", "-f", f"sleep {OWN}"], capture_output=True).returncode == 1


def test_an_absent_launcher_is_named_with_its_package(tmp_path: Path) -> None:
    result = here("launch", "--launcher", "mpich", "--", "true", cwd=tmp_path, PATH="/nonexistent")
    assert result.returncode == 2
    assert "no mpich on PATH: install mpich" in result.stderr


@pytest.mark.parametrize(
    ("options", "missing", "shown"),
    [
        (("--launcher", "openmpi"), "no openmpi on PATH: install openmpi", "Open MPI 5.0"),
        (("--launcher", "srun", "--hosts", "a,b"), "no srun on PATH: install slurm-client", "srun"),
        (("--hosts", "a,b"), "no mpirun, mpiexec or srun on PATH: install openmpi", "Intel MPI 2021.17"),
    ],
)
def test_a_dry_run_needs_no_launcher_and_says_so(
    options: tuple[str, ...], missing: str, shown: str, tmp_path: Path
) -> None:
    words = ("launch", "--ppn", "1", *options, "--dry-run", "--", "true")
    result = here(*words, cwd=tmp_path, PATH="/nonexistent")
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[0].startswith(f"note: {missing}")
    assert result.stderr.splitlines()[0].endswith(f"; the command is for {shown}")
    assert " true\n" in result.stdout and not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHosts]:
    with fake_hosts(tmp_path_factory.mktemp("hosts"), 4) as hosts:
        yield hosts


def on_first(hosts: FakeHosts, name: str, *command: str) -> list[str]:
    """Tokens that run a command on the first host, with a launcher on PATH."""
    env = {**hosts.env, **mpi_path(name), "PYTHONPATH": str(Path.cwd())}
    return hosts.inside(hosts.names[0], "env", *(f"{key}={value}" for key, value in env.items()), *command)


def launch_on(hosts: FakeHosts, name: str, *arguments: str, cwd: Path) -> list[str]:
    """Tokens of a launch from h1 on all hosts."""
    command = (sys.executable, "-m", "cputrain", "launch", "--launcher", name.removesuffix("4"))
    listed = ("--hosts", ",".join(hosts.names), "--ppn", str(PPN), "--output", str(cwd / "out"))
    return on_first(hosts, name, *command, *listed, *arguments)


def ran(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=HANGS_S)


PS_SHOWS_TOKEN = """
import os, socket, subprocess, time
time.sleep(1)
lines = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True).stdout
seen = os.environ["CPUTRAIN_JOB_TOKEN"] in lines
print(f"{socket.gethostname()}: agents {'cputrain.mpi.supervise.agent' in lines}, token {seen}", flush=True)
"""


RARELY = (pytest.mark.long, pytest.mark.nightly)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("intelmpi", SUM),
        pytest.param("openmpi4", ALL_REDUCE, marks=pytest.mark.long),
        *(pytest.param(name, ALL_REDUCE, marks=RARELY) for name in MPI if name != "openmpi4"),
        *(pytest.param(name, SUM, marks=RARELY) for name in MPI if name != "intelmpi"),
    ],
    ids=lambda value: {ALL_REDUCE: "torch", SUM: "plain"}.get(value, value),
)
def test_an_all_reduce_over_four_hosts(hosts: FakeHosts, name: str, code: str, tmp_path: Path) -> None:
    """Its output is labeled and logged; no process of the hosts, of which one is the launching one, shows the job's
    token."""
    script = tmp_path / "sum.py"
    script.write_text(code + PS_SHOWS_TOKEN)
    flags = ("--no-preflight",) if code == SUM else ()
    argv = launch_on(hosts, name, *flags, "--", sys.executable, str(script), cwd=tmp_path)
    result = ran(argv)
    assert result.returncode == 0, result.stderr + result.stdout
    size = 4 * PPN
    for rank in range(size):
        host = hosts.names[rank // PPN]
        said = f"rank {rank} on {host} of {size} sum {size * (size + 1) / 2}", f"{host}: agents True, token False"
        assert {f"[{host}:{rank}] {line}" for line in said} <= {*result.stdout.splitlines()}
        assert {*said} <= {*(tmp_path / f"out/logs/rank-{rank}.log").read_text().splitlines()}
    assert "\x1b" not in result.stdout
    usage = read_usage(tmp_path / "out")
    assert usage is not None and [*usage.workers] == [*range(size)] and [*usage.hosts] == sorted(hosts.names)
    assert [*usage.planned] == [*range(size)]


ALIKE = ("mpi-worker.1.foo.example", "mpi-worker.2.foo.example")
THREADS = "import os, socket; print(socket.gethostname(), os.environ['OMP_NUM_THREADS'])"


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHosts]:
    with fake_hosts(tmp_path_factory.mktemp("alike"), ALIKE) as hosts:
        yield hosts


@pytest.mark.parametrize("name", launchers("mpich"))
def test_hosts_that_share_their_first_label_have_their_own_plans_and_labels(
    alike: FakeHosts, name: str, tmp_path: Path
) -> None:
    groups = (f"{ALIKE[0]}=pack:1 core:1 pu:1", f"{ALIKE[1].upper()}=pack:1 core:2 pu:1")
    options = ("--ppn", "1", "--comm-cores", "0", "--allow-other-layout", "--output", str(tmp_path / "out"))
    launch = (sys.executable, "-m", "cputrain", "launch", "--launcher", name.removesuffix("4"), *options)
    listed = [word for group in groups for word in ("--host-group", group)]
    argv = on_first(alike, name, *launch, *listed, "--", sys.executable, "-c", THREADS)
    result = ran(argv)
    assert result.returncode == 0, result.stderr + result.stdout
    assert sorted(result.stdout.splitlines()) == [f"[MPI-WORKER.2:1] {ALIKE[1]} 2", f"[mpi-worker.1:0] {ALIKE[0]} 1"]


def test_a_job_on_this_host_alone_needs_no_launcher(tmp_path: Path) -> None:
    options = ("--hosts", socket.gethostname().upper(), "--ppn", "1", "--output", "out")
    argv = (*options, "--", sys.executable, "-c", "print('hello')")
    result = cputrain("launch", *argv, cwd=tmp_path, PATH="/nonexistent")
    assert (result.returncode, result.stdout) == (0, "[0] hello\n"), result.stderr
    for host in ("127.0.0.1", "localhost"):
        argv = ("--hosts", host, "--ppn", "1", "--dry-run", "--", "true")
        shown = here("launch", *argv, cwd=tmp_path, PATH="/nonexistent")
        assert shown.returncode == 0 and " on PATH" not in shown.stderr, shown.stderr
        assert "mpirun" not in shown.stdout and "env RANK=0 " in shown.stdout, shown.stdout


@pytest.mark.parametrize("name", [pytest.param("openmpi", marks=pytest.mark.long), "mpich"])
def test_a_script_under_mpirun_on_several_hosts(hosts: FakeHosts, name: str, tmp_path: Path) -> None:
    """Rank 0's host has to be given, by hand or by launch.sh; the port is one that all ranks find by themselves."""
    (tmp_path / "sum.py").write_text(ALL_REDUCE if name == "openmpi" else SUM)
    hosts_of = {"openmpi": ("--allow-run-as-root", "--bind-to", "none", "--host"), "mpich": ("-hosts",)}[name]
    mpirun = ("mpirun", *hosts_of, "h1:1,h2:1")
    python_m = (sys.executable, "-m")
    bind = (*python_m, "cputrain.affinity.bind", "--plan-here", '{"ppn": 1, "nodes": 2}', "--", sys.executable)
    bind += (str(tmp_path / "sum.py"),)
    refused = ran(on_first(hosts, name, *mpirun, *bind))
    assert refused.returncode != 0 and "the host of rank 0 is unknown: set MASTER_ADDR" in refused.stderr
    if name == "mpich":
        result = ran(on_first(hosts, name, *mpirun, "-genv", "MASTER_ADDR", "h1", *bind))
    else:
        plan = ("plan", "--hosts", "h1,h2", "--ppn", "1", "--launcher", name, "--write", str(tmp_path / "job"))
        assert ran(on_first(hosts, name, *python_m, "cputrain", *plan)).returncode == 0
        result = ran(on_first(hosts, name, str(tmp_path / "job/launch.sh"), "python", str(tmp_path / "sum.py")))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"rank {i} on h{i + 1} of 2 sum 3.0" for i in range(2)]


@pytest.mark.parametrize("name", launchers("openmpi"))
def test_hosts_that_differ_have_a_plan_for_each_group(hosts: FakeHosts, name: str, tmp_path: Path) -> None:
    """Two hosts planned as this machine, one as a machine of a single core: each rank is bound by its host's plan."""
    code = "import os; print(os.environ['RANK'], os.environ['LOCAL_WORLD_SIZE'], sorted(os.sched_getaffinity(0)))"
    launch = (sys.executable, "-m", "cputrain", "launch", "--launcher", name, "--output", str(tmp_path / "out"))
    kinds = ("--host-group", "h[1-2]=this", "--host-group", "h3=pack:1 core:1", "--no-preflight")
    argv = on_first(hosts, name, *launch, *kinds, "--", sys.executable, "-c", code)
    result = ran(argv)
    assert result.returncode == 0, result.stderr
    this = plan_machine(this_machine(), Request(), Runtime()).workers
    lines = dict(line.split("] ", 1) for line in result.stdout.splitlines() if line.startswith("[h"))
    expected = {
        f"[h{host}:{rank}": f"{rank} {len(this)} {list(worker.pus)}"
        for host in (1, 2)
        for rank, worker in enumerate(this, (host - 1) * len(this))
    }
    assert lines == {**expected, f"[h3:{2 * len(this)}": f"{2 * len(this)} 1 [0]"}


@pytest.mark.long
@pytest.mark.parametrize(("name", "ppn"), [("intelmpi", PPN), pytest.param("openmpi", 1, marks=pytest.mark.nightly)])
def test_a_training_over_four_hosts(hosts: FakeHosts, name: str, ppn: int, tmp_path: Path) -> None:
    """The real trainer, started as a user starts it: data and run folder where all hosts see them. Its ranks and the
    launch listen on their network alone."""
    write_images(tmp_path / "images", train=12, val=3)
    settings = (f"data.path={tmp_path}/images", *LENET, "batch.local=2", "epochs=1", "schedule.warmup_epochs=0")
    command = (sys.executable, "-m", "cputrain", "train", "imagefolder", *settings)
    flags = ("--no-preflight", "--ppn", str(ppn))
    argv = launch_on(hosts, name, *flags, "--", *command, f"output={tmp_path}/run", "comm.backend=gloo", cwd=tmp_path)
    listening: dict[str, set[str]] = {host: set() for host in hosts.names}
    with (tmp_path / "output").open("w+") as output, subprocess.Popen(argv, stdout=output, stderr=output) as process:
        while process.poll() is None:
            for host, addresses in listening.items():
                addresses.update(hosts.listening(host, "python"))
        output.seek(0)
        assert process.returncode == 0, output.read()
    # The store, the launch and gloo on the first host, at least gloo on the others.
    assert listening == {host: {hosts.address(host)} for host in hosts.names}
    events = read_events(tmp_path / "run")
    bindings = events[0]["bindings"]
    assert [binding["host"] for binding in bindings] == [host for host in hosts.names for _ in range(ppn)]
    assert all(binding["pus"] == binding["planned_pus"] for binding in bindings)
    assert (events[-1]["status"], events[-1]["images"]) == ("done", 36 // (8 * ppn) * 8 * ppn)


@pytest.mark.long
@pytest.mark.parametrize("name", launchers("openmpi"))
def test_a_host_that_is_cut_off_ends_the_job_and_is_named(name: str, tmp_path: Path) -> None:
    with fake_hosts(tmp_path / "hosts", 3) as hosts:
        code = "import time; print('up', flush=True); time.sleep(600)"
        flags = ("--no-preflight", "--ppn", "1")
        argv = launch_on(hosts, name, *flags, "--", sys.executable, "-c", code, cwd=tmp_path)
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            for _ in range(3):
                process.stdout.readline()
            started = time.monotonic()
            hosts.cut("h3")
            _, errors = process.communicate(timeout=60)
        assert time.monotonic() - started < 60
        assert process.returncode == 1
        assert "on h3 has been silent for 15 s" in errors, errors
        deadline = time.monotonic() + 60
        while any(left := hosts.processes("time.sleep(600)").values()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not any(left), left
