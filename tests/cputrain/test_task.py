"""A function on the planned ranks of this host: what each returns, and how failures are told."""

import os
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.planner import Request, plan_this_machine
from cputrain.affinity.topology import this_machine
from cputrain.launch import run_on_ranks
from tests.support.commands import needs_two_cores

FUNCTIONS = """
import os
from cputrain.affinity.errors import InputError, RunError

def place(spec, place):
    return {"spec": spec, "rank": place.rank.rank, "bound": sorted(os.sched_getaffinity(0))}

def fail(spec, place):
    raise RunError(f"no luck with {spec}")

def crash(spec, place):
    raise ValueError(f"no such {spec}")

def refuse(spec, place):
    raise InputError(f"{spec} is too many: give fewer")
"""


@needs_two_cores
def test_a_function_runs_in_each_planned_worker_and_failures_name_it(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "functions-1.dist-info").mkdir()  # ranks import only from folders where packages are installed
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    plan = plan_this_machine(Request(ppn=2, threads=1, comm_cores=0, loader_cores=0), env, machine=this_machine())
    found = run_on_ranks(plan, "functions:place", [1, "a"], tmp_path, env)
    assert [each["rank"] for each in found] == [0, 1] and all(each["spec"] == [1, "a"] for each in found)
    assert [each["bound"] for each in found] == [sorted(worker.pus) for worker in plan.workers]
    with pytest.raises(RunError, match=r"^rank [01] on \S+ exited with status 1; log .*rank-[01]\.log"):
        run_on_ranks(plan, "functions:fail", 3, tmp_path, env)
    with pytest.raises(RunError, match=r"^the work failed: no luck with 3$"):
        run_on_ranks(plan, "functions:fail", 3, tmp_path, env, what="the work")
    with pytest.raises(RunError, match=r"^the work failed: rank [01] on .*; its last line: .*no such 3$"):
        run_on_ranks(plan, "functions:crash", 3, tmp_path, env, what="the work")
    with pytest.raises(InputError, match=r"^the work cannot run: 4 is too many: give fewer$"):
        run_on_ranks(plan, "functions:refuse", 4, tmp_path, env, what="the work")
