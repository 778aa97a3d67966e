"""Jobs that start again after a failure: commands, trainings, fewer hosts; and what is not tried again."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from cputrain.affinity.errors import RunError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.wording import GIB
from cputrain.files import LOGS
from cputrain.launch.command import RemainingHosts, training_arguments, with_missing_module
from cputrain.mpi.hostfile import HostGroup
from cputrain.mpi.launchers import Job
from cputrain.mpi.supervise.processes import JobFailedError, OutOfMemory, RankExit
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.request import remedy
from cputrain.recipe.resume import recipe_text, with_same_global_batch
from cputrain.runs.events import read_events
from cputrain.runs.folder import make_folder
from cputrain.training.local import with_memory_advice
from tests.support.commands import children_of, cputrain, mpi_path
from tests.support.fake_hosts import fake_hosts
from tests.support.images import write_images
from tests.support.machines import build_machine
from tests.support.trainings import LENET, PPN, until_logged

SETTINGS = (*LENET, "batch.local=6", "schedule.warmup_epochs=0")
TRIES = """
import os, sys
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
sys.exit(0 if attempt == "2" else int(sys.argv[1]))
"""


def test_a_failed_command_runs_again_and_knows_which_attempt_it_is(tmp_path: Path) -> None:
    launch = ("launch", "--ppn", "1", "--restarts", "2", "--output", "out", "--", sys.executable, "-c", TRIES)
    done = cputrain(*launch, "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"attempt \d of \d", done.stdout) == [f"attempt {n} of 2" for n in range(3)]
    assert done.stderr.count("exited with status 3") == 2 and "\nrestart 2 of 2\n" in done.stderr
    logs = {path.name: path.read_text() for path in (tmp_path / "out" / LOGS).iterdir()}
    names = ("rank-0.attempt-0.log", "rank-0.attempt-1.log", "rank-0.log")
    assert logs == {name: f"attempt {number} of 2\n" for number, name in enumerate(names)}


@pytest.mark.parametrize(("restarts", "status", "starts"), [("1", 3, 2), ("2", 2, 1)])
def test_restarts_end_after_as_many_and_wrong_input_is_not_tried_again(
    tmp_path: Path, restarts: str, status: int, starts: int
) -> None:
    launch = ("launch", "--ppn", "1", "--restarts", restarts, "--", sys.executable, "-c", TRIES, str(status))
    done = cputrain(*launch, cwd=tmp_path)
    assert done.returncode == (2 if status == 2 else 1)
    assert len(re.findall(r"attempt \d of", done.stdout)) == starts


def test_a_signal_is_no_failure(tmp_path: Path) -> None:
    argv = (sys.executable, "-m", "cputrain", "launch", "--ppn", "1", "--restarts", "3", "--", "sh", "-c")
    with subprocess.Popen((*argv, "echo up; sleep 300"), cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130 and process.stdout.read() == ""


@pytest.mark.long
def test_a_killed_training_restarts_from_its_last_checkpoint(tmp_path: Path) -> None:
    write_images(tmp_path / "images", train=9, val=7)
    often = ("checkpoint.every_steps=20", "evaluate.every_epochs=null", "epochs=60")  # lasts until the kill
    sizes = ("data.path=images", *SETTINGS, *often, f"plan.ppn={PPN}", "comm.backend=gloo", "output=run")
    argv = [sys.executable, "-m", "cputrain", "train", "imagefolder", *sizes, "--restarts", "2"]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until_logged(tmp_path / "run", "checkpoint", process)
        ranks = [pid for pid in children_of(process.pid) if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]
        os.kill(ranks[-1], signal.SIGKILL)
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "was ended by SIGKILL" in err and "\nrestart 1 of 2\n" in err and "run continues after step " in out
    end = read_events(tmp_path / "run")[-1]
    assert (end["status"], end["starts"]) == ("done", 2)
    assert (tmp_path / "run/logs/rank-0.attempt-0.log").is_file()


def test_only_a_training_goes_on_without_a_host() -> None:
    """One host that there is nowhere (RFC 2606), and this one."""
    hosts = ("127.0.0.1", "n2.invalid")
    failure = JobFailedError("", hosts=hosts)
    for command in (("cputrain", "train", "demo-digits"), ("/bin/python3", "-m", "cputrain", "train", "x.yaml")):
        remaining = RemainingHosts(hosts=hosts, command=command)
        assert training_arguments(command) and remaining.after(failure) == hosts[:1]
        assert remaining.after(JobFailedError("", hosts=hosts[:1])) == hosts[:1], (
            "a host that is gone is not taken back"
        )
        assert remaining.after(JobFailedError("")) == hosts[:1]
    with pytest.raises(RunError, match=r"n2.invalid did not respond and only cputrain train keeps its global batch"):
        RemainingHosts(hosts=hosts, command=("python", "train.py")).after(failure)
    with pytest.raises(RunError, match="none of its hosts responds"):
        RemainingHosts(hosts=hosts[1:], command=("cputrain", "train", "demo-digits")).after(failure)
    nothing_known = RemainingHosts(hosts=hosts, command=("python", "train.py")).after(JobFailedError(""))
    assert nothing_known == hosts


def test_fewer_workers_keep_the_global_batch_of_the_run(tmp_path: Path) -> None:
    recipe = load_recipe("imagefolder", (f"output={tmp_path}/run", "batch.local=8", "data.path=images"))
    make_folder(recipe.folder, recipe_text(recipe), overwrite=False)
    start = '{"event": "start", "time": 1.0, "bindings": [], "workers": 4, "global_batch": 32, "train_images": 9, '
    (tmp_path / "run/events.jsonl").write_text(start + '"classes": 3}\n')
    batch = with_same_global_batch(recipe, 3).batch
    assert (batch.global_, batch.local, batch.accumulation) == (32, 8, 1)
    assert with_same_global_batch(recipe, 4) == recipe
    fixed = load_recipe("imagefolder", (f"output={tmp_path}/run", "batch.global=32", "data.path=images"))
    assert with_same_global_batch(fixed, 3) == fixed


def trainings_of_rank(rank: int, folder: Path) -> list[int]:
    """The processes of all hosts that train as this rank into the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            is_rank = f"RANK={rank}".encode() in (path / "environ").read_bytes().split(b"\0")
            if is_rank and words[1:4] == [b"-m", b"cputrain", b"train"] and f"output={folder}/run".encode() in words:
                found.append(int(path.name))
    return found


@pytest.mark.long
@pytest.mark.nightly
def test_a_training_goes_on_over_the_hosts_that_are_left(tmp_path: Path) -> None:
    """Three hosts, of which one is cut off, then a rank of another one killed: two train to the end with the same
    global batch."""
    write_images(tmp_path / "images", train=24, val=3)
    often = ("checkpoint.every_steps=4", "evaluate.every_epochs=null", "epochs=40")
    settings = (f"data.path={tmp_path}/images", *SETTINGS, *often, "comm.backend=gloo", f"output={tmp_path}/run")
    train = (sys.executable, "-m", "cputrain", "train", "imagefolder", *settings)
    with fake_hosts(tmp_path / "hosts", 3) as hosts:
        env = [f"{key}={value}" for key, value in {**hosts.env, **mpi_path("mpich")}.items()]
        launch = (sys.executable, "-m", "cputrain", "launch", "--launcher", "mpich", "--restarts", "2", "--ppn", "1")
        flags = ("--hosts", ",".join(hosts.names), "--output", str(tmp_path / "out"), "--", *train)
        argv = hosts.inside("h1", "env", *env, f"PYTHONPATH={Path.cwd()}", *launch, *flags)
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True) as process:
            events = tmp_path / "run/events.jsonl"
            until_logged(tmp_path / "run", "checkpoint", process)
            hosts.cut("h3")
            while events.read_text().count('{"event": "start"') < 2:
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            (second,) = trainings_of_rank(1, tmp_path)
            os.kill(second, signal.SIGKILL)
            out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err + out
    assert err.count("restarting on 2 hosts, without h3") == 2
    starts = [event for event in read_events(tmp_path / "run") if event["event"] == "start"]
    assert [(start["workers"], start["global_batch"]) for start in starts] == [(3, 18), (2, 18), (2, 18)]
    assert read_events(tmp_path / "run")[-1]["status"] == "done"


def test_a_training_without_memory_is_told_a_batch_that_fits() -> None:
    recipe = load_recipe("imagefolder", ("data.path=x", "model.name=resnet18", "data.crop=224", "batch.local=32"))

    def told(limit_bytes: int, nodes: int = 1) -> str:
        shortage = OutOfMemory(used_bytes=0, limit_bytes=limit_bytes, whole="control group")
        return remedy(recipe, ppn=1, nodes=nodes, shortage=shortage)

    found = re.match(r"set batch.local=(\d+) batch.global=32, which keeps the global batch: cputrain sweep", told(GIB))
    assert found is not None and 1 <= int(found[1]) < 32
    assert told(64 * GIB).startswith("set batch.local=16 batch.global=32"), "the estimate was too low: half of it"
    assert told(64 * GIB, nodes=8).startswith("set batch.local=16 batch.global=256")
    assert told(GIB // 4).startswith("use fewer workers")


def test_what_became_of_the_recipe_never_takes_the_place_of_the_failure(tmp_path: Path) -> None:
    shortage = OutOfMemory(used_bytes=0, limit_bytes=12 * GIB, whole="control group")
    cause = RankExit(rank=1, host="n1", status=-9, time=0.0, log="l", tail=(), shortage=shortage)
    failure = JobFailedError("rank 1 on n1 was ended by SIGKILL", cause=cause)
    group = HostGroup(hosts=("n1",), plan=plan_machine(build_machine(1, 1, 4, 1), Request(ppn=2), Runtime()))

    def told(*arguments: str) -> str:
        command = ("python", "-m", "cputrain", "train", *arguments)
        assert training_arguments(command) == arguments
        job = Job(groups=(group,), command=command, plan_path=tmp_path, log_dir=tmp_path)
        return str(with_memory_advice(failure, job, arguments))

    assert told(str(tmp_path / "gone.yaml"), "--resume") == told() == str(failure)
    assert told("imagefolder", "--overwrite", "batch.local=64").startswith(f"{failure}\nset batch.local=")
    assert told("imagefolder", "batch.local=1").endswith("use fewer workers (--ppn 1), or a smaller data.crop")


def test_a_module_of_intel_s_time_that_is_missing_is_named_with_the_remedy() -> None:
    missing = "ModuleNotFoundError: No module named '{}'"

    def told(module: str) -> str:
        tail = ("Traceback", missing.format(module))
        cause = RankExit(rank=0, host="n1", status=1, time=0.0, log="l", tail=tail)
        failed = JobFailedError("rank 0 exited with status 1", cause=cause)
        return str(with_missing_module(failed)).splitlines()[-1]

    assert told("oneccl_bindings_for_pytorch").startswith(
        'oneccl_bindings_for_pytorch: pip install "cputrain[compat]" provides it'
    )
    assert told("intel_extension_for_pytorch").endswith('pip install "cputrain[compat]" provides its API')
    for other in ("numpy", "oneccl_bindings"):
        assert told(other) == "rank 0 exited with status 1"
