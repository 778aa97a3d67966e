"""A trial: a few steps of a training in real processes, to see whether their memory is enough."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import RunError
from affinity.start import own_program
from cputrain.launch.local import PlannedTraining, local_job
from cputrain.runs.folder import CHECKPOINTS, LOGS, RECIPE, make_folder
from cputrain.sweep.outcomes import FAILED, outcome_of
from mpi.supervise.local import run_local

STEPS = 3
TRAINS = "trains"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One local batch and how its trial ended.

    `memory` is the kind of memory that the plan uses. `estimate_bytes` is the planner's estimate of a worker's peak
    resident memory, None for a network that the planner does not know; `peak_bytes` the largest measured one.
    """

    local_batch: int
    global_batch: int
    memory: str
    estimate_bytes: int | None
    peak_bytes: int | None
    status: str
    ended_by: str


def run_trial(planned: PlannedTraining, memory_bytes: int | None, env: Mapping[str, str]) -> Trial:
    """Train STEPS steps in the planned workers; `memory_bytes` limits the data of all of them together.

    Raises KeyboardInterrupt where SIGINT or SIGTERM has stopped it.
    """
    recipe, folder = planned.recipe, planned.recipe.folder
    make_folder(recipe, planned.plan, overwrite=True)
    for old in folder.glob(peak_file(folder, "*").name):
        old.unlink()
    share = 0 if memory_bytes is None else memory_bytes // planned.ppn
    command = (*own_program("cputrain.sweep.trial_rank"), str(folder / RECIPE), str(share))
    job = local_job(planned.plan, command, folder)
    status, why = TRAINS, ""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        try:
            code = run_local(job, env, nowhere, nowhere)
            if code >= 128:
                raise KeyboardInterrupt
            if code:
                status, why = FAILED, f"exited with status {code}; logs {folder / LOGS}"
        except RunError as error:
            status, why = outcome_of(str(error))
    workload = planned.plan.request.workload
    known = workload is not None and not workload.assumed
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    peaks = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(peak_file(folder, "*").name)]
    return Trial(
        local_batch=recipe.batch.local,
        global_batch=planned.sizes.global_batch,
        memory=planned.plan.memory_kind(planned.plan.workers[0]),
        estimate_bytes=planned.plan.workers[0].memory_bytes if known else None,
        peak_bytes=max(peaks, default=None),
        status=status,
        ended_by=why,
    )


def peak_file(folder: Path, rank: int | str) -> Path:
    """The file of a rank's peak memory, in bytes."""
    return folder / f"peak-rank-{rank}.json"
