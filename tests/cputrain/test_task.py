"""A function on the planned ranks of this host: what each returns, and how failures are told."""

import json
import os
import re
from pathlib import Path

from cputrain.affinity.planner.plan_file import plan_to_json
from cputrain.affinity.planner.records import plan_this_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.launch.rank_process import run_on_ranks
from tests.support.commands import needs_two_cores
from tests.support.forked import ROOT, ended, forked

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


# Each failure is that of a start of both ranks, which are forked.
FAILURES = """
import json, os, sys
from pathlib import Path
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.planner.plan_file import read_plan
from cputrain.launch.rank_process import run_on_ranks
from tests.support.fork_server import fork_ranks

fork_ranks()
plan, folder, failures = read_plan(Path("plan.json")), Path.cwd(), []
for function, spec, what in json.loads(sys.argv[1]):
    try:
        run_on_ranks(plan, f"functions:{function}", spec, folder, os.environ, **what)
    except (InputError, RunError) as error:
        failures.append(["InputError" if isinstance(error, InputError) else "RunError", str(error)])
print(json.dumps(failures))
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
    (tmp_path / "plan.json").write_text(plan_to_json(plan))
    the_work = {"what": "the work"}
    expected = [
        (("fail", 3, {}), "RunError", r"rank [01] on \S+ exited with status 1; log .*rank-[01]\.log"),
        (("fail", 3, the_work), "RunError", r"the work failed: no luck with 3$"),
        (("crash", 3, the_work), "RunError", r"the work failed: rank [01] on .*; its last line: .*no such 3$"),
        (("refuse", 4, the_work), "InputError", r"the work cannot run: 4 is too many: give fewer$"),
    ]
    path = f"{tmp_path}:{ROOT}"
    with forked("-c", FAILURES, json.dumps([case for case, *_ in expected]), cwd=tmp_path, PYTHONPATH=path) as process:
        end = ended(process)
    assert end.status == 0, end.err
    for (kind, told), (_, error, message) in zip(json.loads(end.out), expected, strict=True):
        assert kind == error and re.match(message, told), told
