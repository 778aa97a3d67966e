"""Job scripts: as they read, clean to shellcheck, safe from any value, and run by a real Slurm."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affinity.errors import InputError
from affinity.plan import Request, plan_machine
from affinity.runtime import Runtime
from affinity.sysfs import this_machine
from cputrain.events import read_events
from mpi.batch import Batch, job_script, parse_sweep
from mpi.cluster import Kind, job_plan_json
from mpi.fabric import settings_for
from mpi.job import Job
from mpi.launch import bound, start
from mpi.launcher import find_launcher, newest
from mpi.run import free_port
from tests.conftest import cputrain, mpi_path, refused, write_images
from tests.slurm_cluster import Slurm, slurm_cluster
from tests.test_launchers import WHO

PLAIN = Batch(
    name="resnet50",
    recipe="name: resnet50\n",
    settings=(),
    output="runs/resnet50",
    data="/data/imagenet",
    nodes=256,
    ppn=2,
    pus_per_node=96,
    time="02:00:00",
    launcher="intelmpi",
    launch=("mpirun", "-np", "512", "-genv", "I_MPI_PIN", "0", "-machinefile"),
    plan_options=("--ppn", "2", "--nodes", "256", "--fabric", "opa"),
    fabric=settings_for("opa"),
)
FULL = replace(
    PLAIN,
    partition="skx",
    account="a1",
    modules=("gcc/12", "python"),
    venv="/home/me/my venv",
    container="image's.sif",
    stage="/scratch/x y",
    sweep=("batch.local", ("16", "32")),
    settings=("plan.threads=20",),
)
CORES = len(this_machine().allowed_cores)


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
@pytest.mark.parametrize("which", ["plain", "full"])
def test_scripts_as_they_read(scheduler: str, which: str, golden) -> None:
    golden(f"batch/{scheduler}-{which}.sh", job_script({"plain": PLAIN, "full": FULL}[which], scheduler))


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
@pytest.mark.parametrize("batch", [PLAIN, FULL])
def test_scripts_are_clean_to_shellcheck(scheduler: str, batch: Batch) -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    script = job_script(batch, scheduler)
    result = subprocess.run([checker, "--shell=bash", "-"], input=script, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def directives(script: str) -> dict[str, str]:
    """PBS's own lines: option -> value, resources of -l by name."""
    found = {}
    for line in script.splitlines():
        if line.startswith("#PBS "):
            option, _, value = line.removeprefix("#PBS ").partition(" ")
            key, equals, rest = value.partition("=")
            found[f"{option} {key}" if option == "-l" and equals else option] = rest if option == "-l" else value
    return found


def test_pbs_directives_say_what_is_wanted() -> None:
    assert directives(job_script(FULL, "pbs")) == {
        "-N": "resnet50",
        "-l select": "256:ncpus=96:mpiprocs=2",
        "-l place": "scatter:excl",
        "-l walltime": "02:00:00",
        "-q": "skx",
        "-A": "a1",
        "-J": "0-1",
        "-j": "oe",
        "-r": "y",
    }


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"partition": "a b"}, "--partition 'a b'"),
        ({"account": "x;reboot"}, "--account"),
        ({"account": "-x"}, "--account"),
        ({"time": "soon"}, "--time 'soon'"),
        ({"time": "1:00\n#SBATCH -p all"}, "--time"),
    ],
)
def test_what_cannot_stand_in_a_scheduler_s_line_is_refused(changes: dict, told: str) -> None:
    for scheduler in ("slurm", "pbs"):
        with pytest.raises(InputError, match=told):
            job_script(replace(PLAIN, **changes), scheduler)


def test_sweeps_are_key_and_values() -> None:
    assert parse_sweep("batch.local=16, 32") == ("batch.local", ("16", "32"))
    for text in ("batch.local", "=1", "a b=1", "x=1,,2", "$(x)=1"):
        with pytest.raises(InputError, match="--array"):
            parse_sweep(text)


# Each breaks out of one way of quoting; all at once they would only be a syntax error, which runs nothing.
PAYLOADS = (
    *("$(touch canary)", "`touch canary`", "; touch canary; ", "\ntouch canary\n", "| touch canary", "&touch canary&"),
    *("'; touch canary; '", "'$(touch canary)'", '"; touch canary; "', '"$(touch canary)"', "${x:-$(touch canary)}"),
    *(")\ntouch canary\n(", "END_OF_RECIPE\ntouch canary\n", "a[$(touch canary)]", "#\ntouch canary"),
)
HOSTILE = st.tuples(st.text("ab /-=.,", max_size=6), st.sampled_from(PAYLOADS)).map("".join)


@settings(max_examples=60)
@given(texts=st.lists(HOSTILE, min_size=8, max_size=8))
@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_no_value_becomes_shell_code(
    tmp_path_factory: pytest.TempPathFactory, scheduler: str, texts: list[str]
) -> None:
    """The script runs under bash with commands that do nothing; a value that was read as code would leave a file."""
    folder = tmp_path_factory.mktemp("hostile")
    name, recipe, setting, output, venv, container, stage, value = texts
    batch = replace(
        FULL,
        name=name,
        recipe=recipe,
        settings=(setting,),
        output="run/" + output.replace("/", "_"),
        modules=(texts[2],),
        venv=venv,
        container=container,
        stage=stage,
        data=texts[3],
        sweep=("batch.local", (value, "2")),
        launch=("mpirun", texts[4]),
    )
    script = re.sub(r"^\. ", ": ", job_script(batch, scheduler), flags=re.MULTILINE)  # there is no such venv
    stubs = folder / "bin"
    stubs.mkdir()
    for program in ("srun", "mpirun", "pbsdsh", "apptainer", "scontrol", "module"):
        (stubs / program).write_text("#!/bin/sh\nexit 0\n")
        (stubs / program).chmod(0o755)
    (folder / "nodes").write_text("h1\nh1\n")
    env = {
        "PATH": f"{stubs}:/usr/bin:/bin",
        **{"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "7"},
        **{"PBS_JOBID": "7.pbs", "PBS_ARRAY_INDEX": "0", "PBS_O_WORKDIR": str(folder), "PBS_NODEFILE": "nodes"},
    }
    ran = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=30)
    assert ran.returncode == 0, ran.stderr  # it went through to its end
    assert not list(folder.rglob("canary"))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), CORES) as cluster:
        yield cluster


def test_slurm_accepts_the_256_node_script(slurm: Slurm, tmp_path: Path) -> None:
    arguments = ("resnet50-skx-256node", "--machine", "skx-8160-2s", "--nodes", "256", "--time", "02:00:00")
    script = cputrain("job", "slurm", *arguments, "--partition", "fake", cwd=tmp_path)
    assert script.returncode == 0, script.stderr
    result = slurm.run("sbatch", "--test-only", cwd=tmp_path, text=script.stdout)
    assert result.returncode == 0, result.stderr
    assert "using 24576 processors" in result.stderr and "c[001-256]" in result.stderr


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder whose name needs quotes, with images, as a user may have it."""
    folder = tmp_path / "it's my project"
    folder.mkdir()
    write_images(folder / "my images", train=9, val=7)
    return folder


SMALL = ("imagefolder", "data.path=my images", "model.name=resnet18", "data.crop=32", "batch.local=6")
HERE = ("--nodes", "1", "--ppn", str(CORES), "--fabric", "shm")


def submitted(slurm: Slurm, place: Path, *arguments: str) -> str:
    """Submit a small training; its job's number. The script finds this Python under the name python."""
    script = cputrain("job", "slurm", *arguments, *HERE, "--venv", str(venv(place)), cwd=place)
    assert script.returncode == 0, script.stderr
    result = slurm.run("sbatch", "--parsable", cwd=place, text=script.stdout)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def venv(place: Path) -> Path:
    """A virtual environment whose path needs quotes: this one, by another name."""
    link = place / "a venv"
    link.symlink_to(sys.prefix)
    return link


def wait_for(slurm: Slurm, job: str, place: Path, states: set[str], limit_s: float = 120.0) -> str:
    deadline = time.monotonic() + limit_s
    while (state := slurm.state(job, place)) not in states:
        logs = "".join(path.read_text(errors="replace") for path in place.glob("*.out"))
        assert time.monotonic() < deadline and state not in ("FAILED", "NODE_FAIL"), f"{state}\n{logs}"
        time.sleep(0.3)
    return state


def test_slurm_runs_the_script_end_to_end(slurm: Slurm, place: Path) -> None:
    job = submitted(
        slurm, place, *SMALL, "epochs=1", "schedule.warmup_epochs=0", "output=the 'run'", "--time", "00:10:00"
    )
    wait_for(slurm, job, place, {"COMPLETED"})
    log = (place / f"training-{job}.out").read_text() if (place / f"training-{job}.out").is_file() else ""
    events = read_events(place / "the 'run'")
    assert events[-1]["status"] == "done", log
    assert len(events[0]["bindings"]) == CORES
    assert [b["pus"] for b in events[0]["bindings"]] == [b["planned_pus"] for b in events[0]["bindings"]]


def test_slurm_s_time_limit_requeues_and_the_training_goes_on(slurm: Slurm, place: Path) -> None:
    """The notice comes (sent here, as Slurm sends it), the job is requeued, goes on from its checkpoint and ends."""
    steps = ("epochs=40", "schedule.warmup_epochs=0", "output=run", "--time", "00:10:00")
    job = submitted(slurm, place, *SMALL, *steps)
    events = place / "run/events.jsonl"
    deadline = time.monotonic() + 120
    while not (events.is_file() and '"checkpoint"' in events.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert slurm.run("scancel", "--batch", "--signal=USR1", job, cwd=place).returncode == 0
    wait_for(slurm, job, place, {"COMPLETED"}, limit_s=240)
    told = "".join(path.read_text(errors="replace") for path in place.glob("*.out"))
    assert "requeued, to go on from the last checkpoint" in told
    starts = [event for event in read_events(place / "run") if event["event"] == "start"]
    ends = [event for event in read_events(place / "run") if event["event"] == "end"]
    assert (len(starts), [end["status"] for end in ends]) == (2, ["stopped", "done"])
    steps_done = [event["step"] for event in read_events(place / "run") if event["event"] == "step"]
    assert steps_done == list(range(1, ends[-1]["steps"] + 1))  # none lost, none twice


def test_a_pbs_script_trains_stops_at_the_notice_and_goes_on(place: Path) -> None:
    """Without PBS itself: its variables, its node file, its SIGTERM, then the chain's next job; under Intel MPI."""
    arguments = ("epochs=40", "schedule.warmup_epochs=0", "output=run", "--time", "1:00:00", "--venv", str(venv(place)))
    made = cputrain("job", "pbs", *SMALL, *arguments, *HERE, "--launcher", "intelmpi", cwd=place)
    assert made.returncode == 0, made.stderr
    (place / "nodes").write_text("localhost\n" * CORES)
    path = {**os.environ, **mpi_path("intelmpi")}
    env = {**path, **dict(find_launcher("intelmpi", path).variables)}
    env |= {"PBS_JOBID": "7.pbs", "PBS_O_WORKDIR": str(place), "PBS_NODEFILE": str(place / "nodes")}
    job = subprocess.Popen(["bash", "-c", made.stdout], cwd=place, env=env, stdout=subprocess.PIPE, text=True)
    events = place / "run/events.jsonl"
    deadline = time.monotonic() + 120
    while not (events.is_file() and '"step"' in events.read_text()):
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 143 and "stopped by SIGUSR1" in said
    again = subprocess.run(["bash", "-c", made.stdout], cwd=place, env=env, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    steps_done = [event["step"] for event in read_events(place / "run") if event["event"] == "step"]
    assert steps_done == list(range(1, len(steps_done) + 1)) and read_events(place / "run")[-1]["status"] == "done"
    finished = subprocess.run(["bash", "-c", made.stdout], cwd=place, env=env, capture_output=True, text=True)
    assert finished.returncode == 0 and "run is finished" in finished.stdout


@pytest.mark.parametrize("binder", ["self", "launcher"])
def test_srun_gives_each_rank_its_pus(slurm: Slurm, binder: str, tmp_path: Path) -> None:
    """Our srun line inside an allocation of both hosts; every rank tells the mask that the kernel gave it."""
    plan = plan_machine(this_machine(), Request(ppn=CORES), Runtime())
    code = (
        "import os, json; from affinity.rank import discover; r = discover(os.environ); "
        "said = [r.rank, r.world_size, r.local_rank, sorted(os.sched_getaffinity(0))]; "
        "os.write(1, json.dumps(said).encode() + b'\\n')"
    )
    job = Job(
        kinds=(Kind(hosts=("n1", "n2"), plan=plan),),
        command=(sys.executable, "-c", code),
        plan_path=tmp_path / "plan.json",
        log_dir=tmp_path / "logs",
        binder=binder,
    )
    made = start(job, newest("srun"), bound(job), tmp_path)
    job.plan_path.write_text(job_plan_json(job.kinds))
    for path, text in made.files:
        path.write_text(text)
    result = slurm.run("salloc", "-N2", "--exclusive", *made.argv, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    said = sorted(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))
    workers = [list(worker.pus) for worker in plan.workers]
    assert said == [[i, 2 * CORES, i % CORES, workers[i % CORES]] for i in range(2 * CORES)]


def test_a_script_under_srun_finds_its_rank(slurm: Slurm, tmp_path: Path) -> None:
    """`cputrain launch` as a rank, affinity.bind, and the line that plan prints, over two hosts of a rank each."""
    (tmp_path / "x.py").write_text(WHO)
    planned = ("plan", "--ppn", "1", "--hosts", "n1,n2", "--launcher", "srun", "--format")
    (tmp_path / "plan.json").write_text(cputrain(*planned, "json").stdout)
    shown = cputrain(*planned, "command").stdout.replace("CMD...", f"{sys.executable} x.py")
    srun = f"srun -n2 --ntasks-per-node=1 --cpu-bind=none {sys.executable} -m"
    ways = (
        f"{srun} cputrain launch -- {sys.executable} x.py",
        f"{srun} affinity.bind --plan plan.json -- {sys.executable} x.py",
        shown,
    )
    for way in ways:
        result = slurm.run("salloc", "-N2", "--exclusive", "sh", "-c", way, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        said = sorted(json.loads(line)[1:] for line in result.stdout.splitlines() if line.startswith("["))
        assert [line[:3] for line in said] == [[[str(i), "2", "0", "1"]] * 3 for i in range(2)]
        assert said[0][4:] == said[1][4:] and said[0][4] == "n1" and 20_000 <= int(said[0][5]) < 30_000


TOGETHER = """
import os, torch, torch.distributed as dist, torch.distributed.nn.functional
dist.init_process_group("gloo")
sum = torch.ones(1)
dist.all_reduce(sum)
os.write(1, f"rank {dist.get_rank()} sum {int(sum)} pus {sorted(os.sched_getaffinity(0))}\\n".encode())
dist.destroy_process_group()
"""


def test_launch_inside_an_allocation_takes_its_hosts_and_srun(slurm: Slurm, tmp_path: Path) -> None:
    """The pre-flight, the monitor and its agents, all through srun; then a rank that fails is named."""
    launch = ("salloc", "-N2", "--exclusive", sys.executable, "-m", "cputrain", "launch", "--ppn", str(CORES))
    ran = slurm.run(*launch, "--", sys.executable, "-c", TOGETHER, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "pre-flight: 2 hosts are alike and answer" in ran.stderr
    said = sorted(re.findall(r"rank (\d) sum (\d) pus (\[.*\])", ran.stdout))
    pus = [list(worker.pus) for worker in plan_machine(this_machine(), Request(ppn=CORES), Runtime()).workers]
    assert said == [(str(i), str(2 * CORES), str(pus[i % CORES])) for i in range(2 * CORES)]
    fails = ("--no-preflight", "--", "sh", "-c", 'test "$RANK" = 1 && exit 3; exec sleep 60')
    failed = slurm.run(*launch, *fails, cwd=tmp_path)
    assert failed.returncode == 1 and "rank 1 on " in failed.stderr and "exited with status 3" in failed.stderr


@pytest.mark.parametrize(("mpi", "transport"), [("pmi2", "mpi"), ("none", "ofi")])
def test_oneccl_starts_under_srun(slurm: Slurm, mpi: str, transport: str) -> None:
    ranks = (
        f"--mpi={mpi}",
        "-n2",
        "--ntasks-per-node=1",
        f"--export=ALL,MASTER_ADDR=127.0.0.1,MASTER_PORT={free_port()}",
    )
    meet = (sys.executable, "-m", "tests.ccl_rank", "meet")
    result = slurm.run("salloc", "-N2", "--exclusive", "srun", *ranks, *meet, cwd=Path(__file__).parents[1])
    assert result.returncode == 0, result.stderr
    said = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"rank"')]
    assert sorted((line["rank"], line["sum"], line["transport"]) for line in said) == [
        (i, 2.0, transport) for i in (0, 1)
    ]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--bind", "launcher"), "--bind launcher"),
        (("--launcher", "openmpi"), "started by srun"),
        (("--local-batch", "8"), "set batch.local=8"),
    ],
)
def test_options_that_a_job_cannot_heed_are_refused(options: tuple[str, ...], told: str) -> None:
    arguments = ("job", "slurm", "imagefolder", "--machine", "skx-8160-2s", "--nodes", "2", "--time", "1:00:00")
    assert told in refused(cputrain(*arguments, *options))


def test_submitting_needs_the_scheduler(tmp_path: Path) -> None:
    arguments = ("job", "pbs", "imagefolder", "--nodes", "2", "--machine", "skx-8160-2s", "--time", "1:00:00")
    assert "--submit needs qsub" in refused_after_script(cputrain(*arguments, "--submit", cwd=tmp_path, PATH="/none"))
    assert "--time" in refused(cputrain(*arguments[:-1], "soon", cwd=tmp_path))


def refused_after_script(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 2
    return result.stderr
