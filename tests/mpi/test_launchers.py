"""Real launchers: every rank prints its numbers and the CPUs that the kernel gave it."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.start import isolated_command
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.mpi.launch_command import find_launcher
from cputrain.mpi.launchers import LAUNCHERS, bound_command
from tests.support.commands import CORES, HANGS_S, PYTHON, cputrain, here, launchers, mpi_path
from tests.support.images import write_images
from tests.support.jobs import job_of, printed_lists, written
from tests.support.trainings import LENET

WORKERS = min(2, CORES)
REQUEST = Request(ppn=WORKERS)
PRINT_RANK = (
    "import os, json; from cputrain.affinity.rank import rank_from_env; rank = rank_from_env(os.environ); "
    "os.write(1, json.dumps([rank.rank, rank.world_size, rank.local_rank, "
    "sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], os.environ['MASTER_ADDR'], "
    "os.environ.get('GREETING')]).encode() + b'\\n')"
)
PRINT_CONVENTION = (
    "import os; from cputrain.affinity.rank import rank_from_env; "
    "os.write(1, f'convention {rank_from_env(os.environ).convention}\\n'.encode())"
)
# A script that does not import cputrain: its CPUs, its numbers by all names, where it would meet the others.
PRINT_NAMES = """
import json, os
names = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
numbers = [[os.environ.get(name) for name in four] for four in names]
place = [os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")]
os.write(1, json.dumps([sorted(os.sched_getaffinity(0)), *numbers, *place]).encode() + b"\\n")
"""
# A C program in few words: MPI_Init, the sum of 1 + rank over all ranks.
MPI_SUM = """
import ctypes, os, sys
mpi = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
assert mpi.MPI_Init(None, None) == 0
is_open_mpi = hasattr(mpi, "ompi_mpi_comm_world")
def handle(name, number):
    symbol = ctypes.c_char.in_dll(mpi, name) if is_open_mpi else None
    return ctypes.c_void_p(ctypes.addressof(symbol)) if is_open_mpi else ctypes.c_int(number)
world, of_int, add = handle("ompi_mpi_comm_world", 0x44000000), handle("ompi_mpi_int", 0x4c000405), \
    handle("ompi_mpi_op_sum", 0x58000003)
rank, size, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
mpi.MPI_Comm_size(world, ctypes.byref(size))
mpi.MPI_Allreduce(ctypes.byref(ctypes.c_int(rank.value + 1)), ctypes.byref(total), 1, of_int, add, world)
line = f"MPI {rank.value} of {size.value}, sum {total.value}, PMI_RANK {os.environ.get('PMI_RANK')}"
os.write(1, line.encode() + b"\\n")
mpi.MPI_Finalize()
"""
RARELY = (pytest.mark.long, pytest.mark.nightly)


def ran(
    name: str,
    folder: Path,
    binder: str,
    command: tuple[str, ...],
    request: Request = REQUEST,
    *,
    bound: bool = True,
    expected_binder: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a command as the ranks of this host; its ranks expect `expected_binder`, as told the binder itself."""
    env = {**os.environ, **mpi_path(name)}
    plan = plan_machine(this_machine(), request, Runtime())
    job = job_of(folder, command, plan, binder=binder, variables=(("GREETING", "good morning, 'you'"),))
    launcher = find_launcher(name.removesuffix("4"), env)
    assert launcher.version[:1] == {"intelmpi": (2021,), "openmpi": (5,), "openmpi4": (4,), "mpich": (5,)}[name]
    own = bound_command(replace(job, binder=expected_binder or binder)) if bound else command
    started = written(job, launcher, own)
    return subprocess.run(
        started.argv, env={**env, **dict(started.variables)}, capture_output=True, text=True, timeout=HANGS_S
    )


@pytest.mark.parametrize(
    ("name", "binder"),
    [
        *((one, "self") for one in ("openmpi4", "mpich")),
        *((one, "launcher") for one in ("intelmpi", "openmpi")),
        *(pytest.param(one, "self", marks=RARELY) for one in ("intelmpi", "openmpi")),
        *(pytest.param(one, "launcher", marks=RARELY) for one in ("openmpi4", "mpich")),
    ],
)
def test_each_rank_has_its_pus(name: str, binder: str, tmp_path: Path) -> None:
    result = ran(name, tmp_path, binder, (sys.executable, "-c", PRINT_RANK))
    lines = printed_lists(result)
    plan = plan_machine(this_machine(), Request(ppn=WORKERS), Runtime())
    assert lines == [
        [i, WORKERS, i, list(worker.pus), str(worker.intra_op), "127.0.0.1", "good morning, 'you'"]
        for i, worker in enumerate(plan.workers)
    ]


@pytest.mark.parametrize("name", launchers("intelmpi", "openmpi", "openmpi4", "mpich"))
def test_each_rank_has_the_variables_of_the_launcher_s_convention(name: str, tmp_path: Path) -> None:
    result = ran(name, tmp_path, "self", (sys.executable, "-c", PRINT_CONVENTION), bound=False)
    assert result.returncode == 0, result.stderr
    convention = LAUNCHERS[name.removesuffix("4")].own_variables.convention
    assert [line for line in result.stdout.splitlines() if line] == [f"convention {convention}"] * WORKERS


@pytest.mark.parametrize("name", launchers("openmpi4", "mpich"))
def test_more_ranks_than_cores_have_the_shared_cores_of_the_plan(name: str, tmp_path: Path) -> None:
    request = Request(ppn=CORES + 1, oversubscribe=True)
    result = ran(name, tmp_path, "self", (sys.executable, "-c", PRINT_RANK), request)
    lines = printed_lists(result)
    assert [(one[0], one[3]) for one in lines] == [
        (i, list(worker.pus)) for i, worker in enumerate(plan_machine(this_machine(), request, Runtime()).workers)
    ]


@pytest.mark.parametrize("name", launchers("openmpi", "mpich"))
def test_a_launcher_s_wrong_binding_is_reported(name: str, tmp_path: Path) -> None:
    """Unbound, though the launcher was to bind: both masks are named."""
    if WORKERS < 2:
        pytest.skip(reason="needs two cores")
    result = ran(name, tmp_path, "self", ("true",), expected_binder="launcher")
    assert result.returncode != 0
    assert "the launcher bound CPUs 0-1 (mask 0x3), planned" in result.stderr


@pytest.mark.parametrize("name", launchers("intelmpi", "openmpi"))
def test_a_written_launch_script_runs_as_it_is(name: str, tmp_path: Path) -> None:
    """plan --write with a path that needs quotes, then launch.sh from another folder, of which it finds a script, in a
    plain environment, where `python` is the one that planned."""
    folder = tmp_path / "it's a job"
    planned = ("plan", "--ppn", str(WORKERS), "--hosts", "localhost", "--launcher", name.removesuffix("4"))
    written = here(*planned, "--write", str(folder), **path_of(name, tmp_path))
    assert written.returncode == 0, written.stderr
    assert {"plan.json", "plan.svg", "hosts", "launch.sh"} <= {path.name for path in folder.iterdir()}
    checker = Path(sys.executable).with_name("shellcheck")
    assert subprocess.run([checker, folder / "launch.sh"], capture_output=True).returncode == 0
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "x.py").write_text(PRINT_NAMES)
    check_ranks(plainly([str(folder / "launch.sh"), "python", "x.py"], place))


@pytest.mark.parametrize("name", launchers("openmpi4", "mpich"))
def test_a_script_under_mpirun_finds_its_rank(name: str, tmp_path: Path) -> None:
    """By hand, with cputrain.affinity.bind; with `cputrain launch` as a rank; by the line that plan prints."""
    (tmp_path / "x.py").write_text(PRINT_NAMES)
    (tmp_path / "plan.json").write_text(here("plan", "--ppn", str(WORKERS), "--format", "json").stdout)
    path = path_of(name, tmp_path)
    launcher = find_launcher(name.removesuffix("4"), {**os.environ, **path})
    mpirun = [*(f"{n}={value}" for n, value in launcher.variables), f"PATH={path['PATH']}", launcher.program]
    unbound = {"intelmpi": ["-genv", "I_MPI_PIN", "0"], "mpich": []}.get(name, ["--bind-to", "none"])
    if name.startswith("openmpi"):
        unbound += ["--allow-run-as-root", *(["--prefix", launcher.prefix] if launcher.prefix else [])]
    mpirun = ["env", *mpirun, *unbound, "-np", str(WORKERS), sys.executable, "-m"]
    check_ranks(
        plainly([*mpirun, "cputrain.affinity.bind", "--plan", "plan.json", "--", sys.executable, "x.py"], tmp_path)
    )
    check_ranks(plainly([*mpirun, "cputrain", "launch", "--", sys.executable, "x.py"], tmp_path))
    assert not (tmp_path / "runs").exists()
    refused = plainly([*mpirun, "cputrain", "launch", "--ppn", "7", "--", "true"], tmp_path)
    assert refused.returncode != 0 and f"--ppn 7, but this host has {WORKERS} ranks: remove --ppn" in refused.stderr
    command = ("plan", "--ppn", str(WORKERS), "--launcher", name.removesuffix("4"), "--format", "command")
    shown = here(*command, **path).stdout.replace("CMD...", f"{PYTHON} x.py")
    check_ranks(plainly(["sh", "-c", shown], tmp_path))


@pytest.mark.parametrize("name", launchers("intelmpi", "openmpi4"))
def test_the_names_that_scripts_read_mislead_no_mpi(name: str, tmp_path: Path) -> None:
    """A program of the real MPI has MPI's ranks under its mpirun, and is alone under `cputrain launch`."""
    path = path_of(name, tmp_path)
    launcher = find_launcher(name.removesuffix("4"), {**os.environ, **path})
    library = "libmpi.so.40" if launcher.name == "openmpi" else "libmpi.so.12"
    folder = f"{launcher.prefix}/lib/" if launcher.prefix else ""
    program = ("--", sys.executable, "-c", MPI_SUM, f"{folder}{library}")
    found = {**path, **dict(launcher.variables), "LD_LIBRARY_PATH": folder}
    alone = cputrain("launch", "--ppn", str(WORKERS), *program, cwd=tmp_path, **found)
    assert alone.returncode == 0, alone.stderr
    assert sorted(alone.stdout.splitlines()) == [f"[{i}] MPI 0 of 1, sum 1, PMI_RANK {i}" for i in range(WORKERS)]
    together = ran(name, tmp_path, "self", program[1:])
    assert together.returncode == 0, together.stderr
    total = WORKERS * (WORKERS + 1) // 2
    lines = sorted(line for line in together.stdout.splitlines() if line.startswith("MPI"))
    assert lines == [f"MPI {i} of {WORKERS}, sum {total}, PMI_RANK {i}" for i in range(WORKERS)]


@pytest.mark.long
@pytest.mark.nightly
def test_a_training_starts_by_the_documents_line_and_by_the_one_that_plan_prints(tmp_path: Path) -> None:
    """The documents' `mpirun -np N -ppn N`, and what `plan RECIPE` prints with a relative path, from another folder."""
    write_images(tmp_path / "images", train=4, val=1)
    network = (*LENET, "batch.local=2", "schedule.warmup_epochs=0")
    training = ("imagefolder", "data.path=images", *network, "epochs=1", "comm.backend=gloo")
    path = mpi_path("intelmpi")
    launcher = find_launcher("intelmpi", {**os.environ, **path})
    variables = (f"{name}={value}" for name, value in (*launcher.variables, *path.items()))
    mpirun = ["env", *variables, "mpirun", "-ppn", str(WORKERS)]
    train = [sys.executable, "-m", "cputrain", "train", *training, "output=one"]
    direct = plainly([*mpirun, *train], tmp_path)
    assert direct.returncode == 0 and "top-1 " in direct.stdout, direct.stderr
    planned = ("plan", *training, "--ppn", str(WORKERS), "--launcher", "intelmpi", "--format", "command")
    shown = here(*planned, cwd=tmp_path, **path).stdout
    assert f"data.path={tmp_path}/images" in shown and "data.path=images" not in shown
    (tmp_path / "elsewhere").mkdir()
    there = plainly(["sh", "-c", shown], tmp_path / "elsewhere")
    assert there.returncode == 0 and "top-1 " in there.stdout, there.stderr


def test_torchrun_s_ranks_may_be_launched(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(PRINT_NAMES)
    argv = [f"--nproc-per-node={WORKERS}", "--no-python", sys.executable, "-m", "cputrain", "launch", "--"]
    check_ranks(plainly([sys.executable, "-m", "torch.distributed.run", *argv, sys.executable, "x.py"], tmp_path))


def test_a_workers_line_runs_from_a_shell(tmp_path: Path) -> None:
    """What plan and a dry run of launch print for a host without a launcher."""
    (tmp_path / "x.py").write_text(PRINT_NAMES)
    ppn = ("--ppn", str(WORKERS))
    shown = here("plan", *ppn, "--format", "command").stdout.replace("CMD...", f"{PYTHON} x.py")
    check_ranks(plainly(["sh", "-c", shown], tmp_path))
    failing = shown.replace(f"{PYTHON} x.py", "sh -c 'exit $((3 + RANK))'")
    assert plainly(["sh", "-c", failing], tmp_path).returncode == 2 + WORKERS
    output = here("launch", *ppn, "--dry-run", "--", sys.executable, "x.py").stdout.splitlines()
    check_ranks(plainly(["sh", "-c", output[-1]], tmp_path))
    worker = next(line for line in output if line.startswith("  env RANK=0 "))
    assert "--plan runs/launch-" in worker and f"WORLD_SIZE={WORKERS} " in worker


def test_a_dry_run_shows_the_agents_without_a_token(tmp_path: Path) -> None:
    output = here("launch", "--launcher", "mpich", "--dry-run", "--", "true", **mpi_path("mpich")).stdout
    own = " ".join(isolated_command("cputrain.mpi.supervise.agent"))
    assert f"{own} --report-to ADDRESS:PORT --into " in output
    assert "CPUTRAIN_JOB_TOKEN=TOKEN " in output and "launch.sh CMD" in output


def plainly(argv: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in another folder, with nothing in the environment but what a login shell has."""
    env = {"HOME": os.environ.get("HOME", "/"), "PATH": "/usr/bin:/bin"}
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=HANGS_S)


def check_ranks(result: subprocess.CompletedProcess[str]) -> None:
    """Every rank has the same numbers by every name, was bound as planned, and would meet the others."""
    lines = printed_lists(result)
    plan = plan_machine(this_machine(), Request(ppn=WORKERS), Runtime())
    host = [lines[0][5], lines[0][6], "lo"]
    assert host[0] in ("127.0.0.1", "localhost") and host[1].isdigit()
    assert [line[5:] for line in lines] == [host] * WORKERS
    numbers = [[str(n) for n in (i, WORKERS, i, WORKERS)] for i in range(WORKERS)]
    assert [line[1:5] for line in lines] == [[number] * 4 for number in numbers]
    assert [line[0] for line in lines] == [list(worker.pus) for worker in plan.workers]


def path_of(name: str, folder: Path) -> dict[str, str]:
    """PATH with the launcher first, also where this Python's own folder is on it."""
    path = mpi_path(name)
    return {"PATH": f"{link_first(folder)}:{path['PATH']}"} if name == "openmpi4" else path


def link_first(folder: Path) -> Path:
    """A folder with the system's mpirun, to stand before this Python's on PATH."""
    (folder / "bin").mkdir()
    (folder / "bin/mpirun").symlink_to("/usr/bin/mpirun.openmpi")
    return folder / "bin"
