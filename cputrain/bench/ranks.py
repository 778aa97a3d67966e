"""Runs programs in the planned workers of this host, without output, and tells why one failed."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from affinity.errors import InputError, RunError
from affinity.planner.plan import Plan
from affinity.start import own_program
from cputrain.bench.model_rank import SPEC, Spec, result_file
from cputrain.launch.local import PlannedTraining, local_job
from cputrain.runs.folder import LOGS, RECIPE, make_folder
from mpi.supervise.local import run_local

SIGNALED = 128


def run_ranks(plan: Plan, command: tuple[str, ...], folder: Path, env: Mapping[str, str], *, what: str) -> None:
    """Run a command as each worker of the plan in `folder`, to its end; `what` names it in messages.

    Raises InputError where the ranks refuse their input, RunError where one fails, KeyboardInterrupt where SIGINT or
    SIGTERM has stopped them.
    """
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        try:
            status = run_local(local_job(plan, command, folder), env, nowhere, nowhere)
        except RunError as error:
            raise RunError(f"{what} failed: {_cause(str(error).splitlines())}") from None
    if status >= SIGNALED:
        raise KeyboardInterrupt
    if status:
        log = folder / LOGS / "rank-0.log"
        raise InputError(
            f"{what} cannot run: {_cause(log.read_text(encoding='utf-8', errors='backslashreplace').splitlines()[-1:])}"
        )


def _cause(lines: list[str]) -> str:
    """The line that a rank has printed about its failure, else the launcher's own."""
    texts = [line.strip().removeprefix("| ") for line in lines]
    printed = [text.removeprefix("cputrain: ") for text in texts if text.startswith("cputrain: ")]
    return (printed or texts or ["no message"])[0]


def measure_training(
    planned: PlannedTraining, spec: Spec, env: Mapping[str, str], *, what: str
) -> list[dict[str, Any]]:
    """Train a few steps of a recipe in its planned workers; what each rank has measured, by rank.

    Replaces the run in its folder. Raises as `run_ranks` does.
    """
    folder = planned.recipe.folder
    make_folder(planned.recipe, planned.plan, overwrite=True)
    (folder / SPEC).write_text(json.dumps(asdict(spec)), encoding="utf-8")
    command = (*own_program("cputrain.bench.model_rank"), str(folder / RECIPE))
    run_ranks(planned.plan, command, folder, env, what=what)
    return [json.loads(result_file(folder, rank).read_text(encoding="utf-8")) for rank in range(planned.ppn)]
