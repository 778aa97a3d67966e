"""The processes of small trainings: a killed rank, signals, other launchers and scripts, where their threads run."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import plural
from cputrain.report.run import read_usage
from cputrain.runs.events import read_events
from tests.support.ccl_jobs import needs_ccl, ran
from tests.support.checkpoints import differing, newest
from tests.support.commands import CORES, children_of, cputrain, needs_two_cores
from tests.support.forked import ended, forked, in_fork, writing
from tests.support.trainings import PPN, SMALL, until_logged

# torch 2.13 aborts at exit now and then where this import comes after the group's start (see comm/group.py).
THEIRS = """
import os, sys, torch, torch.distributed as dist, torch.distributed.nn.functional
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
model(torch.full((2, 4), float(dist.get_rank() + 1))).sum().backward()
dist.all_reduce(model.bias.grad)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "gradient", model.bias.grad.item(),
      "pus", sorted(os.sched_getaffinity(0)), "threads", torch.get_num_threads(), flush=True)
dist.destroy_process_group()
"""


@needs_two_cores
@pytest.mark.parametrize(
    ("backend", "by", "expected"),
    [
        pytest.param(
            "ccl", signal.SIGKILL, "rank 1 on {} was ended by SIGKILL; log run/logs/rank-1.log", marks=needs_ccl
        ),
        pytest.param("gloo", signal.SIGSTOP, "rank 1 on {} has been stopped for ", marks=pytest.mark.long),
    ],
)
def test_a_killed_or_stopped_rank_ends_the_training_and_is_named(
    place: Path, backend: str, by: signal.Signals, expected: str
) -> None:
    argv = ("-m", "cputrain", "train", "imagefolder", *SMALL, "epochs=500", f"comm.backend={backend}")
    executed = writing(lambda out, err: subprocess.Popen([sys.executable, *argv], cwd=place, stdout=out, stderr=err))
    with executed if by == signal.SIGKILL else forked(*argv, cwd=place) as process:
        until_logged(place / "run", "step", process)
        children = children_of(process.pid)  # first the ranks, in their order
        killed = time.monotonic()
        os.kill(children[1], by)
        end = ended(process, 60)
    assert time.monotonic() - killed < 60  # 15 on a machine that is not busy
    assert end.status == 1
    # Rank 0 may have time to print its own message, of a lost connection, before the launcher ends it.
    headline = next(line for line in end.err.splitlines() if re.match("cputrain: (?!rank 0)", line))
    assert headline.startswith(f"cputrain: {expected.format(socket.gethostname())}"), end.err
    assert "Traceback" not in end.err
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_a_third_party_script_runs_bound_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(THEIRS)
    result = cputrain("launch", "--ppn", str(PPN), "--output", "out", "--", sys.executable, "train.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    for rank in range(PPN):
        worker = plan["workers"][rank]
        printed = f"[{rank}] rank {rank} of {PPN} gradient {2.0 * PPN} pus {worker['compute_pus']} "
        assert f"{printed}threads {worker['intra_op']}\n" in result.stdout


@pytest.mark.long
def test_torchrun_can_start_the_trainer(place: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PPN}", "-m", "cputrain")
    argv = [sys.executable, *launcher, "train", "imagefolder", *SMALL]
    (place / "scratch").mkdir()
    env = {**os.environ, "TMPDIR": str(place / "scratch")}
    result = subprocess.run(argv, cwd=place, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "time to train" in result.stdout
    bindings = read_events(place / "run")[0]["bindings"]
    assert len({tuple(b["pus"]) for b in bindings}) == PPN, "each rank has bound itself to PUs of its own"
    usage = read_usage(place / "run")
    assert usage is not None and [*usage.workers] == [*range(PPN)] and len(usage.hosts) == 1, "each samples itself"
    again = subprocess.run(argv, cwd=place, env=env, capture_output=True, text=True, timeout=300)
    assert again.returncode != 0 and "add --resume or --overwrite" in again.stderr
    assert not list((place / "scratch").glob("cputrain-*")), (
        "the plans that ranks make for themselves go away with them"
    )


def test_the_group_s_threads_end_with_it() -> None:
    """Threads of gloo that live on abort the interpreter's exit now and then."""
    code = """
import os, sys, time
from cputrain.affinity.binding import threads_of
from cputrain.affinity.planner.plan import Request, plan_machine
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import plural
from cputrain.comm.group import end_group, all_gather, start_group
from cputrain.models.networks import build_model
from cputrain.recipe.schema import ModelSection
from cputrain.affinity.rank import Rank
import torch
rank = Rank(rank=0, world_size=1, local_rank=0, local_world_size=1, convention="env")
worker = plan_machine(this_machine(), Request(ppn=1), Runtime()).workers[0]
group = start_group(rank, worker, sys.argv[1], 60.0, os.environ)
model = torch.nn.parallel.DistributedDataParallel(build_model(ModelSection(name="lenet"), 3, 28))
model(torch.zeros(2, 3, 28, 28)).sum().backward()
all_gather(1)
del model
end_group(group)
def left():
    return [thread.name for thread in threads_of(os.getpid()) if "gloo" in thread.name or "watchdog" in thread.name]
given_s = time.monotonic() + 10  # the kernel lists a thread for a moment after it was joined
while left() and time.monotonic() < given_s:
    time.sleep(0.05)
print(left())
"""
    done = ran(code, "gloo")
    assert done.out.strip() == "[]", done.err


LOADERS = """
import os, torch
from torch.utils.data import DataLoader, Dataset
class Where(Dataset):
    def __len__(self): return 2
    def __getitem__(self, i): return sorted(os.sched_getaffinity(0))
print("loaders", list(DataLoader(Where(), num_workers=2, batch_size=None)), flush=True)
"""


@needs_two_cores
def test_loader_processes_of_a_script_have_the_worker_s_pus(tmp_path: Path) -> None:
    (tmp_path / "loaders.py").write_text(LOADERS)
    pus = list(this_machine().allowed_pus)
    pinned = (cputrain, ("--pin-threads",), ("loaders.py",), pus[:1])  # by OpenMP as it is loaded
    for start, flags, script, where in ((in_fork, (), ("-m", "loaders"), pus), pinned):
        command = ("launch", "--ppn", "1", "--output", f"out{len(flags)}", *flags, "--", sys.executable)
        assert f"loaders {[where, where]}" in start(*command, *script, cwd=tmp_path).stdout


@pytest.mark.long
@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.nightly), "ccl"])
def test_more_workers_than_cores_train_with_a_warning(place: Path, backend: str) -> None:
    cores, ppn = CORES, CORES + 1
    settings = ("plan.oversubscribe=true", f"plan.ppn={ppn}", "batch.local=2", f"comm.backend={backend}", "max_steps=2")
    result = in_fork("train", "imagefolder", *SMALL, *settings, cwd=place)
    assert result.returncode == 0, result.stderr
    assert f"warning: oversubscribed: {ppn} workers share {plural(cores, 'core')}" in result.stdout
    plan = json.loads((place / "run/plan.json").read_text())
    assert plan["oversubscribed"] and any("oversubscribed" in text for text in plan["warnings"])
    start = read_events(place / "run")[0]
    given = [tuple(binding["pus"]) for binding in start["bindings"]]
    assert given == [tuple(worker["compute_pus"]) for worker in plan["workers"]] and len(given) == ppn
    assert start["backend"] == backend


@pytest.mark.long
@needs_two_cores
def test_one_worker_of_several_threads_trains_pinned(place: Path) -> None:
    result = cputrain("train", "imagefolder", *SMALL, "plan.ppn=1", "epochs=1", cwd=place)
    assert result.returncode == 0, result.stderr
    start = read_events(place / "run")[0]
    assert [b["threads"] for b in start["bindings"]] == [CORES]
    variables = json.loads((place / "run/environment.json").read_text())["variables"]
    assert variables["OMP_PROC_BIND"] == "close"
    one = ("plan.ppn=1", "plan.threads=1", "plan.inter_op=2", "--checkpoint", "run/checkpoints/best")
    evaluated = in_fork("eval", "imagefolder", *SMALL, *one, cwd=place)
    assert evaluated.returncode == 0 and "21 images, each once" in evaluated.stdout, evaluated.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "status"), [pytest.param(signal.SIGUSR1, 0, marks=pytest.mark.nightly), (signal.SIGTERM, 143)]
)
def test_a_signal_stops_all_ranks_after_a_step_and_resuming_loses_nothing(
    place: Path, number: signal.Signals, status: int
) -> None:
    """The losses of the interrupted training, step by step, are those of one that was left alone. Checkpoints are
    saved all the time beside it."""
    often = ("checkpoint.every_minutes=0.0001", "checkpoint.every_epochs=null", "evaluate.every_epochs=30")
    arguments = ("train", "imagefolder", *SMALL, "epochs=30", "comm.backend=gloo", *often)
    alone = in_fork(*arguments, "output=alone", cwd=place)
    assert alone.returncode == 0, alone.stderr
    command = [sys.executable, "-m", "cputrain", *arguments]
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until_logged(place / "run", "step", process)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == status and "stopped by a signal" in out, err
    assert ("SIGTERM: 2 workers save and stop after the next step" in err) == (status > 0) or PPN < 2
    end = read_events(place / "run")[-1]
    assert end["status"] == "stopped" and 0 < end["steps"] < read_events(place / "alone")[-1]["steps"]
    resumed = in_fork(*arguments, "--resume", cwd=place)
    assert resumed.returncode == 0, resumed.stderr

    def losses(run: str) -> list[tuple[int, float]]:
        return [(event["step"], event["loss"]) for event in read_events(place / run) if event["event"] == "step"]

    assert losses("run") == losses("alone")
    within = [event for event in read_events(place / "run") if event["event"] == "checkpoint" and event["epoch"] % 1]
    assert within, "checkpoints within an epoch"
    assert sorted(path.name for path in (place / "run/checkpoints").glob(".*")) == [], "nothing unfinished"
    assert differing(newest(place / "run"), newest(place / "alone")) in ([], ["training"]), "buckets are measured"
