"""A few steps of a training in real processes, to see whether their memory is enough."""

import os
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import RunError
from cputrain.events import FILE, read_events
from cputrain.local import Planned
from cputrain.run_folder import CHECKPOINTS, LOGS, PLAN, RECIPE, make_folder
from cputrain.sweep.endings import FAILED, ending, oom_kills
from mpi.cluster import Kind
from mpi.job import Job
from mpi.run import run_local

STEPS = 3
PEAK = "peak_memory"
TRAINS = "trains"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A local batch, the kind of memory it was planned for, a worker's estimated peak in bytes, the largest worker's
    real one (None: not known), and what came of it."""

    local_batch: int
    global_batch: int
    memory: str
    estimate_bytes: int | None
    peak_bytes: int | None
    status: str
    ended_by: str


def run_trial(planned: Planned, memory: str, memory_bytes: int | None) -> Trial:
    """Train STEPS steps in the planned workers; `memory_bytes` limits the data of all of them together.

    Raises KeyboardInterrupt where SIGINT or SIGTERM has ended it.
    """
    recipe, folder = planned.recipe, planned.recipe.folder
    make_folder(recipe, planned.plan, overwrite=True)
    share = 0 if memory_bytes is None else memory_bytes // planned.ppn
    job = Job(
        kinds=(Kind(hosts=("localhost",), plan=planned.plan),),
        command=(sys.executable, "-m", "cputrain.cli.trial", str(folder / RECIPE), str(share)),
        plan_path=folder / PLAN,
        log_dir=folder / LOGS,
    )
    killed, before, status, why = oom_kills(), _largest_child_bytes(), TRAINS, ""
    with Path(os.devnull).open("w") as nowhere:
        try:
            code = run_local(job, nowhere, nowhere)
            if code >= 128:
                raise KeyboardInterrupt
            if code:
                status, why = FAILED, f"exited with status {code}; logs {folder / LOGS}"
        except RunError as error:
            status, why = ending(str(error), oom_killed=oom_kills() > killed)
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    after = _largest_child_bytes()
    events = read_events(folder) if (folder / FILE).is_file() else []
    peaks = next((event["resident_bytes"] for event in events if event["event"] == PEAK), None)
    return Trial(
        local_batch=planned.numbers.global_batch // (planned.ppn * recipe.batch.accumulation),
        global_batch=planned.numbers.global_batch,
        memory=memory,
        estimate_bytes=planned.plan.workers[0].memory_bytes,
        peak_bytes=max(peaks) if peaks else after if after > before else None,
        status=status,
        ended_by=why,
    )


def _largest_child_bytes() -> int:
    """The most that any ended child of this process has had resident."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
