"""A function on the planned ranks of this host, and what each of them has returned.

`python -m cputrain.launch.task TARGET FOLDER` is one of these ranks: bound by its plan, before it imports anything
that starts threads. It reads FOLDER/spec.json and writes FOLDER/rank-N.json.
"""

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.kernel.bound_plan import bound_worker
from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.ranks.rank import discover
from cputrain.affinity.start import own_program
from cputrain.affinity.terminal import use_utf8
from cputrain.files import LOGS, PLAN, write_plan
from cputrain.launch.local import local_job
from cputrain.launch.rank_process import rank_context, run_rank
from cputrain.mpi.supervise.run import run_local

SPEC = "spec.json"
SIGNALED = 128


def run_on_ranks(
    plan: Plan, target: str, spec: Any, folder: Path, env: Mapping[str, str], *, what: str | None = None
) -> list[Any]:
    """Call a function, "module:name", in each worker of the plan, with `spec` and its RankContext; the results by rank.

    `spec` and results are plain values, as JSON has them. `folder` gets the plan and the ranks' logs.

    Raises JobFailedError naming the rank that failed, InputError where ranks refuse their input, KeyboardInterrupt
    where SIGINT or SIGTERM has stopped them. With `what`, which names the work, a RunError with the failed rank's own
    line instead.
    """
    write_plan(folder / PLAN, plan)
    with tempfile.TemporaryDirectory() as name, Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        results = Path(name)
        (results / SPEC).write_text(json.dumps(spec), encoding="utf-8")
        command = (*own_program("cputrain.launch.task"), target, name)
        try:
            status = run_local(local_job(plan, command, folder), env, nowhere, nowhere)
        except RunError as error:
            if what is None:
                raise
            raise RunError(f"{what} failed: {_cause(str(error).splitlines())}") from None
        if status >= SIGNALED:
            raise KeyboardInterrupt
        if status:
            raise InputError(f"{what or 'the task'} cannot run: {_cause(_last_lines(folder / LOGS))}")
        return [json.loads(result_file(results, rank).read_text(encoding="utf-8")) for rank in range(len(plan.workers))]


def result_file(folder: Path, rank: int) -> Path:
    """What a rank has returned."""
    return folder / f"rank-{rank}.json"


def _last_lines(logs: Path) -> list[str]:
    """The last line of each rank's log; a rank that others' refusal has ended has none."""
    texts = (log.read_text(encoding="utf-8", errors="backslashreplace") for log in sorted(logs.glob("rank-*.log")))
    return [line for text in texts for line in text.splitlines()[-1:]]


def _cause(lines: list[str]) -> str:
    """The line that a rank has printed about its failure, else the launcher's own."""
    texts = [line.strip().removeprefix("| ") for line in lines]
    printed = [text.removeprefix("cputrain: ") for text in texts if text.startswith("cputrain: ")]
    return (printed or texts or ["no message"])[0]


def main() -> None:
    """Run one rank."""
    (module, _, name), folder = sys.argv[1].partition(":"), Path(sys.argv[2])
    env = os.environ
    rank, worker = discover(env), bound_worker(env)
    assert rank is not None and worker is not None, "a rank of a task is started by run_on_ranks"
    context = rank_context(rank, worker, env, check=True)
    spec = json.loads((folder / SPEC).read_text(encoding="utf-8"))

    def work() -> None:
        result = getattr(importlib.import_module(module), name)(spec, context)
        result_file(folder, rank.rank).write_text(json.dumps(result), encoding="utf-8")

    run_rank(rank, work)


if __name__ == "__main__":
    use_utf8()
    main()
