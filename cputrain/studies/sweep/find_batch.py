"""Search for the largest local batch that fits into memory, by short trainings."""

import json
import logging
import os
import resource
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from cputrain.affinity.errors import DoesNotFitError, InputError, RunError, as_recipe_key, describe_error
from cputrain.affinity.planner.workload import Workload, footprint, largest_batch
from cputrain.affinity.wording import GIB, plural
from cputrain.files import CHECKPOINTS, LOGS, write_text
from cputrain.launch.rank_process import RankContext, StartOptions
from cputrain.mpi.supervise.signals import PREEMPTION_SIGNAL
from cputrain.rows import Column, Rows
from cputrain.runs.events import FILE as EVENTS
from cputrain.studies.sweep.trainings import DOES_NOT_FIT, FAILED, INVALID, outcome_of
from cputrain.training.local import PlannedTraining, asked_recipe, call_in_ranks, plan_named

CLOSE = 8  # the search ends when the bounds, largest that trains and smallest that fails, differ by 1/CLOSE
STEPS, EVERY_S = 3, 0.1  # steps of a trial; seconds between readings of the peak
TRAINS = "trains"
logger = logging.getLogger(__name__)
ENDED_BY = "ended by"
COLUMNS = (
    Column("local batch", "local_batch"),
    Column("global batch", "global_batch"),
    Column("memory", "memory"),
    Column("estimate GiB", "estimate_bytes", lambda size: f"{size / GIB:.2f}"),
    Column("peak RSS GiB", "peak_bytes", lambda size: f"{size / GIB:.2f}"),
    Column("result", "status"),
    Column(ENDED_BY, "ended_by"),
)
TRIAL_SETTINGS = ("evaluate.every_epochs=null", "checkpoint.every_epochs=null", "max_steps=10")
CSV, MARKDOWN = "find-batch.csv", "find-batch.md"


def next_batch(tried: Mapping[int, bool], start: int, limit: int | None) -> int | None:
    """Return the local batch to try after the ones in `tried` (batch -> whether it trained); None ends the search.

    Doubles from `start` up to `limit`, an upper bound (None: unbounded), then bisects between the largest batch that
    trained and the smallest that did not.
    """
    good = max((batch for batch, trained in tried.items() if trained), default=0)
    bad = min((batch for batch, trained in tried.items() if not trained), default=None)
    if bad is None:
        larger = 2 * good or start
        larger = larger if limit is None else min(larger, limit)
        return larger if larger > good else None
    return None if bad - good <= max(1, good // CLOSE) else (good + bad) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One local batch and how its trial ended.

    `memory` is the kind of memory that the plan uses. `estimate_bytes` is the planner's estimate of a worker's peak
    resident memory, None if the planner does not know the network; `peak_bytes` is the largest measured peak.
    """

    local_batch: int
    global_batch: int
    memory: str = ""
    estimate_bytes: int | None
    peak_bytes: int | None = None
    status: str
    ended_by: str


def run_trial(planned: PlannedTraining, memory_bytes: int | None, env: Mapping[str, str]) -> Trial:
    """Train STEPS steps in the planned workers; `memory_bytes` limits the data of all workers together.

    Raises KeyboardInterrupt if SIGINT or SIGTERM stopped it.
    """
    recipe, folder = planned.recipe, planned.recipe.folder
    for old in folder.glob(peak_file(folder, "*").name):
        old.unlink()
    worker_bytes = 0 if memory_bytes is None else memory_bytes // planned.ppn
    status, why = TRAINS, ""
    try:
        call_in_ranks(planned, f"{__name__}:train_steps", {"bytes": worker_bytes}, env)
    except InputError as error:
        status, why = FAILED, f"{error}; logs {folder / LOGS}"
    except RunError as error:
        status, why = outcome_of(error)
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    peaks = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(peak_file(folder, "*").name)]
    return Trial(
        local_batch=recipe.batch.local,
        global_batch=planned.sizes.global_batch,
        memory=planned.plan.memory_kind(planned.plan.workers[0]),
        estimate_bytes=planned.plan.workers[0].memory_bytes if _known(planned) else None,
        peak_bytes=max(peaks, default=None),
        status=status,
        ended_by=why,
    )


def _known(planned: PlannedTraining) -> Workload | None:
    """Return the planner's workload of the network; None if it is only assumed."""
    workload = planned.plan.request.workload
    return None if workload is None or workload.assumed else planned.plan.runtime.holds(workload)


def peak_file(folder: Path, rank: int | str) -> Path:
    """Return the file of a rank's peak memory in bytes, which survives the rank if it is killed."""
    return folder / f"peak-rank-{rank}.json"


def train_steps(arguments: dict[str, Any], context: RankContext) -> None:
    """Train as one rank of a trial until STEPS steps are done. arguments["bytes"] limits the process's data
    (RLIMIT_DATA; 0: no limit). The peak memory is written to a file."""
    from cputrain.training.session import start_session  # imports torch, which must follow the check of the binding
    from cputrain.training.trainer import train_rank

    recipe, limit = asked_recipe(arguments), arguments["bytes"]
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with suppress(OSError):  # some containers' /proc is read-only
        # makes the kernel's OOM killer choose this process first
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    threading.Thread(target=_watch, args=(recipe.folder, context.rank.rank), daemon=True).start()
    train_rank(start_session(context, recipe, measured=True), StartOptions(prepared=True))
    _write_peak(peak_file(recipe.folder, context.rank.rank))


def _watch(folder: Path, rank: int) -> None:
    """Record the peak as it grows; rank 0 sends itself the preemption signal after STEPS steps."""
    while True:
        time.sleep(EVERY_S)
        _write_peak(peak_file(folder, rank))
        events = folder / EVENTS
        if rank == 0 and events.is_file() and events.read_text(encoding="utf-8").count('"event": "step"') >= STEPS:
            os.kill(os.getpid(), PREEMPTION_SIGNAL)
            return


def _write_peak(path: Path) -> None:
    """Write the peak of this process's resident memory, replacing the file atomically. Not synced, as only a crash of
    the host would lose it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(peak), encoding="utf-8")
    beside.replace(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """A finished search: all trials by batch, the largest batch that trains (None: none does), and the next larger
    batch tried, which does not."""

    trials: tuple[Trial, ...]
    best: Trial | None
    next_larger: Trial

    @property
    def table(self) -> Rows:
        """One row per batch; the last column is the reason if the batch does not train."""
        return Rows(COLUMNS, self.trials)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSearch:
    """A recipe with settings, searched under a memory limit in bytes for all workers together (None: the machine's).

    `start` is the first local batch to try. Trials run in subfolders of `folder`.
    """

    name: str
    settings: tuple[str, ...]
    start: int
    folder: Path
    limit: int | None
    env: Mapping[str, str]

    def plan(self, batch: int) -> PlannedTraining:
        """Plan the trial of a local batch. Raises InputError if it cannot run, DoesNotFitError if memory is short."""
        output = f"output={self.folder / f'local-{batch}'}"
        sizes = (f"batch.local={batch}", "batch.global=null", "batch.accumulation=1")
        planned = plan_named(self.name, (*self.settings, *TRIAL_SETTINGS, *sizes, output), self.env)
        planned = replace(planned, recipe=planned.recipe.as_planned())
        _check_limit(planned, self.limit)
        return planned


def find_batch(search: BatchSearch) -> SearchResult:
    """Try increasing local batches, each for STEPS steps in real processes, up to the planner's estimate.

    Writes find-batch.csv and find-batch.md. Raises InputError if even a batch of 1 cannot be planned.
    """
    smallest = search.plan(1)
    name = smallest.recipe.name
    logger.info("%s: %s; %d steps of each local batch", name, _room(smallest, search.limit), STEPS)
    trials: list[Trial] = []
    rejected, limit = None, None
    while batch := next_batch({trial.local_batch: trial.status == TRAINS for trial in trials}, search.start, limit):
        try:
            planned = search.plan(batch)
        except InputError as error:
            rejected = _rejected(batch, smallest, error)
            # the largest batch that memory allows, or the images of an epoch: the local batch of `smallest` is 1
            of_epoch = smallest.sizes.images_per_epoch // smallest.sizes.global_batch
            limit = error.largest if isinstance(error, DoesNotFitError) else of_epoch
            if limit >= batch:
                raise  # rejected for another reason than its size
            continue
        trials.append(run_trial(planned, search.limit, search.env))
        peak = trials[-1].peak_bytes
        logger.info(
            "batch.local=%d: %s%s", batch, trials[-1].status, f", peak RSS {peak / GIB:.2f} GiB" if peak else ""
        )
    size = attrgetter("local_batch")
    best = max((trial for trial in trials if trial.status == TRAINS), key=size, default=None)
    next_larger = min((trial for trial in trials if trial.status != TRAINS), key=size, default=rejected)
    assert next_larger is not None, "the search ends at a batch that does not train"
    result = SearchResult(trials=tuple(sorted({*trials, next_larger}, key=size)), best=best, next_larger=next_larger)
    title = f"# {name}: largest batch\n\n"
    write_text(search.folder / CSV, result.table.csv())
    write_text(search.folder / MARKDOWN, title + result.table.markdown())
    return result


def _check_limit(planned: PlannedTraining, limit: int | None) -> None:
    """Raise DoesNotFitError if the estimate of a known network exceeds a worker's share of the limit."""
    workload, peak = _known(planned), planned.plan.workers[0].memory_bytes
    worker_bytes = None if limit is None else limit // planned.ppn
    if workload is not None and peak is not None and worker_bytes is not None and peak > worker_bytes:
        raise DoesNotFitError(
            f"{workload.name} with {plural(planned.recipe.batch.local, 'image')} per step needs {peak / GIB:.2f} GiB; "
            f"--memory leaves {worker_bytes / GIB:.2f} GiB to each of {plural(planned.ppn, 'worker')}",
            largest=largest_batch(workload, worker_bytes),
        )


def _rejected(batch: int, smallest: PlannedTraining, error: InputError) -> Trial:
    workload = _known(smallest)
    return Trial(
        local_batch=batch,
        global_batch=batch * smallest.sizes.global_batch,
        estimate_bytes=footprint(workload, batch).total if workload else None,
        status=DOES_NOT_FIT if isinstance(error, DoesNotFitError) else INVALID,
        ended_by=describe_error(error, as_recipe_key),
    )


def _room(planned: PlannedTraining, limit: int | None) -> str:
    """Format the number of workers and the memory available to them."""
    plan, machine = planned.plan, planned.plan.machine
    total = sum(node.memory_bytes for node in machine.numa_nodes)
    limits = [f"{total / GIB:.1f} GiB in this machine"]
    if limit is not None:
        limits.append(f"--memory {limit / GIB:g} GiB (RLIMIT_DATA)")
    elif machine.memory_limit_bytes is not None:
        limits.append(f"{machine.memory_limit_bytes / GIB:.1f} GiB in this control group")
    workload = plan.request.workload
    note = "" if workload is None or not workload.assumed else f"; the planner has no estimate for {workload.name}"
    return f"{plural(planned.ppn, 'worker')}, {', '.join(limits)}{note}"
