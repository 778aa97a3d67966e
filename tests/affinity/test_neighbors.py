"""Processes that another plan has bound: plans warn of them, or avoid them.

Run in a PID namespace where that may be made, so that no other processes of this machine are seen.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain.affinity.bound_plan import Neighbor, contention_warnings, find_neighbors, planned_worker_of, variables_of
from cputrain.affinity.errors import as_option, as_recipe_key, render_message
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.plan_file import plan_to_json, request_to_json
from cputrain.affinity.planner.request import Request
from cputrain.affinity.planner.workload import RESNET50
from cputrain.affinity.topology.machine import name_cpus
from cputrain.affinity.topology.sysfs import this_machine
from tests.support.commands import here, refused
from tests.support.images import write_images
from tests.support.machines import build_machine
from tests.support.trainings import LENET

CORES = this_machine().allowed_cores
UNSHARE = ("unshare", *(() if os.geteuid() == 0 else ("--map-root-user",)), "--pid", "--fork", "--mount-proc")
BESIDE = """
import json, subprocess, sys, time
from pathlib import Path
bind = [sys.executable, "-m", "cputrain.affinity.bind", "--plan", "busy.json", "--local-rank", "0"]
argv = [*bind, "--", "sleep", "600"]
busy = subprocess.Popen(argv)
while b"sleep" not in Path(f"/proc/{busy.pid}/cmdline").read_bytes().split(b"\\0")[:1]:
    time.sleep(0.02)
results = []
for argv in json.loads(sys.argv[1]):
    done = subprocess.run([sys.executable, "-m", *argv], capture_output=True, text=True)
    results.append([busy.pid, done.returncode, done.stdout, done.stderr])
busy.kill()
print(json.dumps(results))
"""


def beside(place: Path, pus: tuple[int, ...], *commands: tuple[str, ...]) -> list[tuple[int, int, str, str]]:
    """What commands do (status, output, errors) beside a process, whose pid comes first, that is bound to PUs."""
    plan = plan_machine(this_machine(), Request(ppn=1), Runtime())
    worker = replace(plan.workers[0], compute_pus=pus, comm_pus=(), loader_pus=(), intra_op=len(pus))
    worker = replace(worker, memory_policy="default", memory_nodes=())
    (place / "busy.json").write_text(plan_to_json(replace(plan, workers=(worker,))))
    allowed = shutil.which("unshare") and subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0
    alone = UNSHARE if allowed else ()  # without the bound processes of other tests
    argv = [*alone, sys.executable, "-c", BESIDE, json.dumps(commands)]
    done = subprocess.run(argv, cwd=place, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_plan_warns_of_bound_processes_and_with_share_avoids_them(tmp_path: Path) -> None:
    taken = CORES[0].pus
    plain, shared, alone, launched = beside(
        tmp_path,
        taken,
        ("cputrain", "plan", "--format", "json"),
        ("cputrain", "plan", "--format", "json", "--share"),
        ("affinity", "plan", "--format", "json", "--share"),
        ("cputrain", "launch", "--output", "run", "--share", "--", "true"),
    )
    warning = next(text for text in json.loads(plain[2])["warnings"] if "in use" in text)
    assert f"{plain[0]} ({name_cpus(taken)})" in warning
    assert warning.endswith(" of another plan: {share=true} avoids it") and "by process " in warning
    for pid, status, out, err in (shared, alone):
        assert status == 0, (pid, err)
        plan = json.loads(out)
        assert not {pu for worker in plan["workers"] for pu in worker["compute_pus"]} & {*taken}
        assert plan["request"]["occupied"] == list(taken) and not any("in use" in text for text in plan["warnings"])
        assert any("{share=true}" in reason["why"] for reason in plan["reasons"])
    assert launched[1] == 0, launched[3]
    assert len(json.loads((tmp_path / "run/plan.json").read_text())["workers"]) == len(json.loads(shared[2])["workers"])


@pytest.mark.long
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_training_shares_the_host_or_warns_that_it_takes_others_cores(tmp_path: Path) -> None:
    write_images(tmp_path / "images", classes=2, train=4, val=2)
    settings = ("data.path=images", *LENET, "engine=eager", "batch.local=2", "epochs=1", "max_steps=1")
    train = ("cputrain", "train", "imagefolder", *settings, "schedule.warmup_epochs=0", "comm.backend=gloo")
    (pid, status, out, err), around = beside(
        tmp_path, CORES[0].pus, (*train, "--dry-run"), (*train, "plan.share=true", "plan.ppn=1", "output=run")
    )
    assert status == 0 and f"{pid} (CPU" in (shown := " ".join(out.split())), err
    assert "plan.share=true avoids it" in shown
    assert around[1] == 0, around[3]
    assert "in use" not in around[2]
    start = json.loads((tmp_path / "run/events.jsonl").read_text().splitlines()[0])
    assert not {*start["bindings"][0]["pus"]} & {*CORES[0].pus}


def test_nothing_left_is_one_line(tmp_path: Path) -> None:
    everything = tuple(sorted(pu for core in CORES for pu in core.pus))
    [(_, status, _, err)] = beside(tmp_path, everything, ("cputrain", "plan", "--share"))
    assert status == 2 and len(err.splitlines()) == 1
    assert f"use all {len(CORES)} cores" in err and "wait until they end, or plan without --share" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--machine", "skx-8160-2s", "--share"),
        ("plan", "--nodes", "2", "--share"),
        ("plan", "--host-group", "n[1-2]=skx-8160-2s", "--share"),
        ("plan", "demo-digits", "plan.share=true", "--nodes", "2"),
        ("launch", "--plan-on-host", "--ppn", "1", "--share", "--", "true"),
        ("job", "slurm", "demo-digits", "--time", "1:00:00", "--share"),
        ("job", "slurm", "demo-digits", "plan.share=true", "--time", "1:00:00"),
    ],
)
def test_sharing_is_for_one_host_that_is_here(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert "share" in refused(here(*arguments, cwd=tmp_path))


def test_a_warning_names_a_few_processes_and_only_those_on_the_plan_s_cores() -> None:
    plan = plan_machine(build_machine(1, 1, 8, 2), Request(ppn=1, threads=2, loader_cores=0), Runtime())
    assert contention_warnings(plan, ()) == contention_warnings(plan, (Neighbor(pid=7, pus=(4, 12)),)) == ()
    neighbors = tuple(Neighbor(pid=pid, pus=(8, 9)) for pid in range(10, 20))  # hyper-threads of the plan's cores
    (warning,) = contention_warnings(plan, neighbors)
    assert render_message(warning, as_option).endswith(" of another plan: --share avoids them")
    assert render_message(warning, as_recipe_key).endswith(" of another plan: plan.share=true avoids them")
    named = ", ".join(f"{pid} (CPUs 8-9)" for pid in range(10, 15))
    assert f"{named} and 5 more of another plan" in warning


@pytest.mark.parametrize(
    ("request_", "taken", "helps"),
    [
        (Request(ppn=1), (0, 1), True),
        (Request(), (0, 1), True),
        (Request(), (0, 1, 2, 3), False),
        (Request(ppn=4), (0,), False),
        (Request(ppn=3), (0,), True),
        (Request(cores=(0, 1)), (0, 1), False),
        (Request(cores=(0, 1)), (0,), True),
        (Request(ppn=1, threads=3), (0, 1), False),
        (Request(ppn=1, local_batch=4, workload=RESNET50), (3,), True),
        (Request(ppn=4, oversubscribe=True), (2, 3), True),
    ],
)
def test_sharing_is_advised_only_where_the_other_cores_are_enough(
    request_: Request, taken: tuple[int, ...], helps: bool
) -> None:
    plan = plan_machine(build_machine(1, 1, 4, 1), request_, Runtime())
    (warning,) = contention_warnings(plan, (Neighbor(pid=7, pus=taken),))
    assert ("{share=true} avoids it" in warning) == helps
    assert warning.endswith("wait until it ends, as too few cores are free of it") != helps


def test_a_plan_in_memory_is_read_only_from_processes_that_have_it() -> None:
    """A bound process's child has the variable, and a pipe where the plan was: reading that would block for ever."""
    request = request_to_json(Request(ppn=1))
    code = (
        "import os, subprocess, sys\n"
        "number = os.environ['AFFINITY_PLAN'].rpartition('/')[2]\n"
        "with subprocess.Popen(['sh', '-c', f'echo $$; exec sleep 600 {number}<&0'], stdin=subprocess.PIPE): pass\n"
    )
    argv = [sys.executable, "-m", "cputrain.affinity.bind", "--plan-here", request, "--", sys.executable, "-c", code]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **place}
    with subprocess.Popen(argv, env={**os.environ, **rank}, stdout=subprocess.PIPE, text=True) as bound:
        assert bound.stdout is not None
        child = int(bound.stdout.readline())
        try:
            name = Path(f"/proc/{child}/comm")
            while name.read_text(encoding="utf-8") != "sleep\n":  # until then it may have no environment
                time.sleep(0.01)
            variables = variables_of(bound.pid)
            worker = planned_worker_of(bound.pid, variables)
            assert worker is not None and worker.local_rank == 0
            assert planned_worker_of(child, variables_of(child)) is None
            assert planned_worker_of(bound.pid, {**variables, "AFFINITY_WORKER": "none"}) is None
            both = {bound.pid, child}
            assert both <= {neighbor.pid for neighbor in find_neighbors({})}
            other_job = {**variables, "MASTER_PORT": "29998"}
            assert both <= {neighbor.pid for neighbor in find_neighbors(other_job)}
            assert not both & {neighbor.pid for neighbor in find_neighbors(variables)}
        finally:
            os.kill(child, signal.SIGKILL)
