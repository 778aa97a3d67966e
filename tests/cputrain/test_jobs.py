"""Job scripts and srun lines run by a real Slurm of two hosts, and a PBS script run with PBS's variables."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import plural
from cputrain.mpi.launch_command import find_launcher, newest_version
from cputrain.mpi.launchers import bound_command
from cputrain.mpi.supervise.run import free_port
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.resume import recipe_text
from cputrain.runs.events import read_events
from cputrain.runs.folder import make_folder
from tests.mpi.test_launchers import PRINT_NAMES
from tests.mpi.test_remote import PS_SHOWS_TOKEN
from tests.support.commands import CORES, PYTHON, here, mpi_path
from tests.support.images import write_images
from tests.support.jobs import job_of, printed_lists, written
from tests.support.slurm_cluster import Slurm
from tests.support.trainings import LENET, until_logged

EVERYTHING = (
    *("--partition", "fake", "--account", "a1", "--qos", "debug", "--constraint", "skx&opa"),
    *("--mail", "me@example.org", "--error", "logs/x-%j.err", "--output", "logs/x-%j.out"),
    *("--directive", "--comment='a b'", "--module-purge"),
)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("resnet50-skx-256node", "--machine", "skx-8160-2s", "--nodes", "256"), "using 24576 processors"),
        (("resnet50-skx-256node", "--nodes", "256", *EVERYTHING), "using 24576 processors"),
        (("--prepare", "imagenet", "raw", "shards", "--short-side", "256", *EVERYTHING), "using 96 processors"),
        (("--nodes", "2", *EVERYTHING, "--", "python", "train.py"), "using 192 processors"),
    ],
)
def test_slurm_accepts_the_scripts(slurm: Slurm, arguments: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    """Whole hosts, whatever is printed of their tasks: 48 cores of two threads each."""
    script = here("job", "slurm", "--time", "02:00:00", "--partition", "fake", *arguments, cwd=tmp_path)
    assert script.returncode == 0, script.stderr
    result = slurm.run("sbatch", "--test-only", cwd=tmp_path, text=script.stdout)
    assert result.returncode == 0, result.stderr
    assert expected in result.stderr


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder whose name needs quotes, with images, as a user may have it."""
    folder = tmp_path / "it's my project"
    folder.mkdir()
    write_images(folder / "my images", train=9, val=7)
    return folder


SMALL = ("imagefolder", "data.path=my images", *LENET, "batch.local=6", "comm.backend=gloo")
LASTING = ("epochs=40", "evaluate.every_epochs=null", "schedule.warmup_epochs=0", "output=run", "--time", "00:10:00")
HERE = ("--nodes", "1", "--ppn", str(CORES))


def submitted(slurm: Slurm, place: Path, *arguments: str) -> str:
    """Submit a small training; its job's number. The script finds this Python under the name python."""
    script = here("job", "slurm", "--venv", str(venv(place)), *arguments, cwd=place)
    assert script.returncode == 0, script.stderr
    result = slurm.run("sbatch", "--parsable", cwd=place, text=script.stdout)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def venv(place: Path) -> Path:
    """A virtual environment whose path needs quotes: this one, by another name."""
    link = place / "a venv"
    if not link.is_symlink():
        link.symlink_to(sys.prefix)
    return link


def wait_for(slurm: Slurm, job: str, place: Path, states: set[str], limit_s: float = 300.0) -> str:
    deadline = time.monotonic() + limit_s
    while (state := slurm.state(job, place)) not in states:
        logs = "".join(path.read_text(errors="replace") for path in place.glob("*.out"))
        assert time.monotonic() < deadline and state not in ("FAILED", "NODE_FAIL"), f"{state}\n{logs}"
        time.sleep(0.3)
    return state


def test_slurm_runs_the_script_end_to_end(slurm: Slurm, place: Path) -> None:
    """Nothing is printed of the host: the plan that is made there takes all of its cores. The data is copied there."""
    arguments = ("plan.ppn=1", "epochs=1", "schedule.warmup_epochs=0", "output=the 'run'", "--time", "00:10:00")
    disk = place.parent / "a host's disk"
    job = submitted(slurm, place, *SMALL, *arguments, "--error", "%x.err", "--stage", str(disk))
    wait_for(slurm, job, place, {"COMPLETED"})
    events = read_events(place / "the 'run'")
    assert events[-1]["status"] == "done", (place / f"imagefolder-{job}.out").read_text()
    assert [b["pus"] for b in events[0]["bindings"]] == [b["planned_pus"] for b in events[0]["bindings"]]
    used = {pu for binding in events[0]["bindings"] for pu in binding["pus"]}
    assert used == set(this_machine().allowed_pus)
    expected = (place / "imagefolder.err").read_text()
    assert (
        f"planned on {socket.gethostname()} for 1 host: {plural(len(events[0]['bindings']), 'worker')} per " in expected
    )
    assert load_recipe(str(place / "the 'run'/recipe.yaml")).data.path == f"{disk}/{job}"
    assert not list(disk.iterdir())  # taken away again


@pytest.mark.long
def test_launch_uses_all_components_of_a_heterogeneous_slurm_job(slurm: Slurm, place: Path) -> None:
    """Each component is started by a part of one srun: numbered through, each rank on its component's host."""
    launch = (sys.executable, "-m", "cputrain", "launch", "--ppn", "1", "--no-preflight", "--output", "run")
    shown = "import os; print(os.environ['SLURMD_NODENAME'], os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True)"
    script = (
        "#!/bin/sh\n#SBATCH --exclusive -N1 -n1 -w n1 -o out\n#SBATCH hetjob\n#SBATCH --exclusive -N1 -n1 -w n2\n"
        f"{shlex.join((*launch, '--', sys.executable, '-c', shown))}\n"
    )
    state = slurm.finish(script, place)
    printed = (place / "out").read_text()
    assert state == "COMPLETED", printed
    assert "n1 0 2" in printed and "n2 1 2" in printed
    assert "of 2 components, 2 hosts (n1; n2): all are planned like this host" in printed


@pytest.mark.long
def test_slurm_s_time_limit_requeues_and_the_training_goes_on(slurm: Slurm, place: Path) -> None:
    """The notice comes (sent here, as Slurm sends it), the job is requeued, goes on from its checkpoint and ends."""
    job = submitted(slurm, place, *SMALL, *LASTING, *HERE)
    until_logged(place / "run", "checkpoint")
    assert slurm.run("scancel", "--batch", "--signal=USR1", job, cwd=place).returncode == 0
    wait_for(slurm, job, place, {"COMPLETED"}, limit_s=400)
    expected = "".join(path.read_text(errors="replace") for path in place.glob("*.out"))
    assert "requeued to resume from the last checkpoint" in expected
    starts = [event for event in read_events(place / "run") if event["event"] == "start"]
    ends = [event for event in read_events(place / "run") if event["event"] == "end"]
    assert (len(starts), [end["status"] for end in ends]) == (2, ["stopped", "done"])
    steps_done = [event["step"] for event in read_events(place / "run") if event["event"] == "step"]
    assert steps_done == list(range(1, ends[-1]["steps"] + 1))  # none lost, none twice


@pytest.mark.nightly
@pytest.mark.long
def test_a_canceled_slurm_job_saves_and_the_next_one_goes_on(slurm: Slurm, place: Path) -> None:
    """A plain scancel: SIGTERM, and SIGKILL after KillWait; the same script submitted again does the other steps."""
    job = submitted(slurm, place, *SMALL, *LASTING, *HERE)
    until_logged(place / "run", "step")
    assert slurm.run("scancel", job, cwd=place).returncode == 0
    wait_for(slurm, job, place, {"CANCELLED"})  # at once, while its ranks save
    until_logged(place / "run", "end")
    logged = read_events(place / "run")
    assert logged[-1]["status"] == "stopped" and len(list((place / "run/checkpoints").iterdir())) > 0
    again = submitted(slurm, place, *SMALL, *LASTING, *HERE)
    wait_for(slurm, again, place, {"COMPLETED"})
    logged = read_events(place / "run")
    steps_done = [event["step"] for event in logged if event["event"] == "step"]
    assert logged[-1]["status"] == "done" and steps_done == list(range(1, logged[-1]["steps"] + 1))


@pytest.mark.long
def test_a_pbs_script_trains_stops_at_the_notice_and_goes_on(place: Path) -> None:
    """Without PBS itself: its variables, its node file, its SIGTERM, then the chain's next job; under Intel MPI."""
    arguments = (*LASTING, "--venv", str(venv(place)))
    made = here("job", "pbs", *SMALL, *arguments, *HERE, "--ncpus", "2", "--launcher", "intelmpi", cwd=place)
    assert made.returncode == 0, made.stderr
    (place / "nodes").write_text("localhost\n" * CORES)
    path = {**os.environ, **mpi_path("intelmpi")}
    env = {**path, **dict(find_launcher("intelmpi", path).variables)}
    env |= {"PBS_JOBID": "71.pbs", "PBS_O_WORKDIR": str(place), "PBS_NODEFILE": str(place / "nodes")}
    job = subprocess.Popen(["bash", "-c", made.stdout], cwd=place, env=env, stdout=subprocess.PIPE, text=True)
    until_logged(place / "run", "step", job)
    job.send_signal(signal.SIGTERM)
    printed, _ = job.communicate(timeout=60)
    assert job.returncode == 143 and "stopped by a signal" in printed
    again = subprocess.run(["bash", "-c", made.stdout], cwd=place, env=env, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    steps_done = [event["step"] for event in read_events(place / "run") if event["event"] == "step"]
    assert steps_done == list(range(1, len(steps_done) + 1)) and read_events(place / "run")[-1]["status"] == "done"
    finished = subprocess.run(["bash", "-c", made.stdout], cwd=place, env=env, capture_output=True, text=True)
    assert finished.returncode == 0 and "run is finished" in finished.stdout


@pytest.mark.long
@pytest.mark.nightly
def test_a_job_whose_first_attempt_failed_before_its_first_step_starts_anew_by_itself(tmp_path: Path) -> None:
    """With the settings of today, which need not be those of that attempt. Its folder is there, of a run of no step."""
    recipe = load_recipe("linear-regression", (f"output={tmp_path}/run", "seed=7"))
    make_folder(recipe.folder, recipe_text(recipe), overwrite=False)
    arguments = ("max_steps=2", "output=run", "--ppn", "1", "--nodes", "1", "--ncpus", "2", "--time", "0:10:00")
    environment = str(venv(tmp_path))
    (tmp_path / "nodes").write_text("localhost\n")
    env = {**os.environ, "PBS_JOBID": "72.pbs", "PBS_O_WORKDIR": str(tmp_path), "PBS_NODEFILE": str(tmp_path / "nodes")}

    def ran(*settings: str) -> str:
        made = here("job", "pbs", "linear-regression", *arguments, *settings, "--venv", environment, cwd=tmp_path)
        assert made.returncode == 0, made.stderr
        done = subprocess.run(["bash", "-c", made.stdout], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "run starts over, as the run in it had not trained a step" in ran()
    assert read_events(tmp_path / "run")[-1]["steps"] == 2 and load_recipe(str(tmp_path / "run/recipe.yaml")).seed == 1
    assert "run continues after step 2, with max_steps: 2 -> 4" in ran("max_steps=4"), "one that has trained goes on"
    steps = [event["step"] for event in read_events(tmp_path / "run") if event["event"] == "step"]
    assert steps == [1, 2, 3, 4] and read_events(tmp_path / "run")[-1]["status"] == "done"


@pytest.mark.parametrize("binder", ["self", "launcher"])
def test_srun_gives_each_rank_its_pus(slurm: Slurm, binder: str, tmp_path: Path) -> None:
    """Our srun line inside an allocation of both hosts; every rank tells the mask that the kernel gave it."""
    plan = plan_machine(this_machine(), Request(ppn=CORES), Runtime())
    code = (
        "import os, json; from cputrain.affinity.rank import rank_from_env; r = rank_from_env(os.environ); "
        "printed = [r.rank, r.world_size, r.local_rank, sorted(os.sched_getaffinity(0))]; "
        "os.write(1, json.dumps(printed).encode() + b'\\n')"
    )
    job = job_of(tmp_path, (sys.executable, "-c", code), plan, ("n1", "n2"), binder=binder)
    made = written(job, newest_version("srun"), bound_command(job))
    result = slurm.run("salloc", "-N2", "--exclusive", *made.argv, cwd=tmp_path)
    workers = [list(worker.pus) for worker in plan.workers]
    assert printed_lists(result) == [[i, 2 * CORES, i % CORES, workers[i % CORES]] for i in range(2 * CORES)]


def test_a_script_under_srun_finds_its_rank(slurm: Slurm, tmp_path: Path) -> None:
    """`cputrain launch` as a rank, affinity.bind, and the line that plan prints, over two hosts of a rank each."""
    (tmp_path / "x.py").write_text(PRINT_NAMES)
    planned = ("plan", "--ppn", "1", "--hosts", "n1,n2", "--launcher", "srun", "--format")
    (tmp_path / "plan.json").write_text(here(*planned, "json").stdout)
    shown = here(*planned, "command").stdout.replace("CMD...", f"{PYTHON} x.py")
    srun = f"srun -n2 --ntasks-per-node=1 --cpu-bind=none {PYTHON} -m"
    ways = (
        f"{srun} cputrain launch -- {PYTHON} x.py",
        f"{srun} cputrain.affinity.bind --plan plan.json -- {PYTHON} x.py",
        shown,
    )
    for way in ways:
        result = slurm.run("salloc", "-N2", "--exclusive", "sh", "-c", way, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        printed = sorted(json.loads(line)[1:] for line in result.stdout.splitlines() if line.startswith("["))
        assert [line[:3] for line in printed] == [[[str(i), "2", "0", "1"]] * 3 for i in range(2)]
        assert printed[0][4:] == printed[1][4:] and printed[0][4] == "n1" and 20_000 <= int(printed[0][5]) < 30_000


CONNECTED = """
import os, socket, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(place) as server:
        others = [server.accept()[0] for _ in range(size - 1)]
    sum = 1 + sum(other.recv(1)[0] for other in others)
    for other in others:
        other.send(bytes([sum]))
while rank > 0:
    try:
        with socket.create_connection(place) as first:
            first.send(b"\\1")
            sum = first.recv(1)[0]
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
os.write(1, f"rank {rank} sum {sum} pus {sorted(os.sched_getaffinity(0))}\\n".encode())
"""


def test_launch_inside_an_allocation_takes_its_hosts_and_srun(slurm: Slurm, tmp_path: Path) -> None:
    """The pre-flight, the monitor and its agents, all through srun; then a rank that fails is named."""
    launch = ("salloc", "-N2", "--exclusive", sys.executable, "-m", "cputrain", "launch", "--ppn", str(CORES))
    ran = slurm.run(*launch, "--", sys.executable, "-IS", "-c", CONNECTED, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "pre-flight: 2 hosts checked in" in ran.stderr
    printed = sorted(re.findall(r"rank (\d) sum (\d) pus (\[.*\])", ran.stdout))
    pus = [list(worker.pus) for worker in plan_machine(this_machine(), Request(ppn=CORES), Runtime()).workers]
    assert printed == [(str(i), str(2 * CORES), str(pus[i % CORES])) for i in range(2 * CORES)]
    fails = ("--no-preflight", "--", "sh", "-c", 'test "$RANK" = 1 && exit 3; exec sleep 60')
    failed = slurm.run(*launch[:-1], "1", *fails, cwd=tmp_path)
    assert failed.returncode == 1 and "rank 1 on " in failed.stderr and "exited with status 3" in failed.stderr
    shows = ("--no-preflight", "--", sys.executable, "-c", PS_SHOWS_TOKEN)
    listed = slurm.run(*launch[:-1], "1", *shows, cwd=tmp_path)
    assert listed.stdout.count("agents True, token False") == 2, listed.stdout + listed.stderr


def commanded(slurm: Slurm, folder: Path, *arguments: str) -> str:
    """Submit a job of any command and wait for its end; what it has printed."""
    options = ("--time", "00:05:00", "--output", "job.out", "--venv", str(venv(folder)))
    script = here("job", "slurm", *options, *arguments, cwd=folder)
    assert script.returncode == 0, script.stderr
    state = slurm.finish(script.stdout, folder)
    printed = (folder / "job.out").read_text()
    assert state == "COMPLETED", printed
    return printed


def test_a_command_s_ranks_are_bound_and_find_each_other(slurm: Slurm, tmp_path: Path) -> None:
    alone = ("--directive", "--export=NONE")  # what the script sets reaches the ranks all the same
    hosts = ("--nodes", "2", "--ppn", str(CORES))
    printed = commanded(slurm, tmp_path, *hosts, *alone, "--", "python", "-IS", "-c", CONNECTED)
    ranks = sorted(re.findall(r"rank (\d) sum (\d) pus (\[.*\])", printed))
    pus = [list(worker.pus) for worker in plan_machine(this_machine(), Request(ppn=CORES), Runtime()).workers]
    assert ranks == [(str(i), str(2 * CORES), str(pus[i % CORES])) for i in range(2 * CORES)], printed


def test_a_command_of_one_rank_is_told_so(slurm: Slurm, tmp_path: Path) -> None:
    tell = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, at $MASTER_ADDR, $((MASTER_PORT > 29499))"
    assert "0 of 1, 0 of 1, at 127.0.0.1, 1\n" in commanded(slurm, tmp_path, "--ppn", "1", "--", "sh", "-c", tell)


@pytest.mark.long
def test_srun_starts_more_ranks_than_cores(slurm: Slurm, tmp_path: Path) -> None:
    request = Request(ppn=CORES + 1, oversubscribe=True)
    launch = ("cputrain", "launch", "--ppn", str(CORES + 1), "--oversubscribe", "--no-preflight")
    where = "import os; os.write(1, f'pus {sorted(os.sched_getaffinity(0))}\\n'.encode())"
    argv = ("salloc", "-N2", "--exclusive", sys.executable, "-m", *launch, "--", sys.executable, "-c", where)
    ran = slurm.run(*argv, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    pus = [list(worker.pus) for worker in plan_machine(this_machine(), request, Runtime()).workers]
    assert sorted(re.findall(r"pus (\[.*\])", ran.stdout)) == sorted(2 * list(map(str, pus)))


@pytest.mark.parametrize(("mpi", "transport"), [("pmi2", "mpi"), pytest.param("none", "ofi", marks=pytest.mark.long)])
def test_oneccl_starts_under_srun(slurm: Slurm, mpi: str, transport: str) -> None:
    ranks = (
        f"--mpi={mpi}",
        "-n2",
        "--ntasks-per-node=1",
        f"--export=ALL,MASTER_ADDR=127.0.0.1,MASTER_PORT={free_port()}",
    )
    meet = (sys.executable, "-m", "tests.support.ccl_rank", "meet")
    result = slurm.run("salloc", "-N2", "--exclusive", "srun", *ranks, *meet, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stderr
    printed = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"rank"')]
    assert sorted((line["rank"], line["sum"], line["transport"]) for line in printed) == [
        (i, 2.0, transport) for i in (0, 1)
    ]
