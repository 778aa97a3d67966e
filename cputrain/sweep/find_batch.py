"""The largest local batch that trains on this machine, by the planner's estimate and by trials."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import DoesNotFitError, InputError
from affinity.planner.workload import footprint, largest_batch
from affinity.text_table import csv_table, markdown_table
from affinity.units import GIB
from affinity.wording import counted
from cputrain.files import write_text
from cputrain.launch.local import PlannedTraining, plan_training
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import BatchSection, SweepSection
from cputrain.sweep.outcomes import DOES_NOT_FIT, INVALID
from cputrain.sweep.search import next_batch
from cputrain.sweep.trial import STEPS, TRAINS, Trial, run_trial

logger = logging.getLogger(__name__)
HEADINGS = ("local batch", "global batch", "memory", "estimate GiB", "peak RSS GiB", "result", "ended by")
TRIAL_SETTINGS = ("evaluate.every_epochs=null", "checkpoint.every_epochs=null", "max_steps=10")
CSV, MARKDOWN = "find-batch.csv", "find-batch.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """A finished search: all trials by batch, the largest batch that trains (None: none does) and the next larger one
    tried, which does not."""

    trials: tuple[Trial, ...]
    best: Trial | None
    next_larger: Trial

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The headings and one row for each batch; the last column is the cause where a batch does not train."""
        return [HEADINGS, *map(_row, self.trials)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSearch:
    """What is searched: a recipe with settings, under a limit in bytes for all workers together (None: the machine's).

    Trials run in subfolders of `folder`.
    """

    recipe: str
    settings: tuple[str, ...]
    folder: Path
    limit: int | None
    env: Mapping[str, str]

    def plan(self, batch: int) -> PlannedTraining:
        """The trial of a local batch. Raises InputError where it cannot run, DoesNotFitError where memory is short."""
        output = f"output={self.folder / f'local-{batch}'}"
        recipe = load_recipe(self.recipe, (*self.settings, *TRIAL_SETTINGS, output))
        recipe = recipe.model_copy(update={"batch": BatchSection(local=batch), "sweep": SweepSection()})
        planned = plan_training(recipe, self.env)
        _check_limit(planned, self.limit)
        return planned


def find_batch(search: BatchSearch) -> SearchResult:
    """Try larger and larger local batches, each for STEPS steps in real processes, up to the planner's estimate.

    Writes find-batch.csv and find-batch.md. Raises InputError where not even a batch of 1 can be planned.
    """
    start = load_recipe(search.recipe, search.settings)
    smallest = search.plan(1)
    logger.info("%s: %s; %d steps of each local batch", start.name, _room(smallest, search.limit), STEPS)
    trials: list[Trial] = []
    rejected, most = None, None
    while batch := next_batch({one.local_batch: one.status == TRAINS for one in trials}, start.batch.local, most):
        try:
            planned = search.plan(batch)
        except InputError as error:
            rejected, most = _rejected(batch, smallest, error), _most(smallest, error)
            if most >= batch:
                raise  # for another reason than its size
            continue
        trials.append(run_trial(planned, search.limit, search.env))
        peak = trials[-1].peak_bytes
        logger.info("batch.local=%d: %s%s", batch, trials[-1].status, f", peak RSS {_gib(peak)} GiB" if peak else "")
    best = max((one for one in trials if one.status == TRAINS), key=_size, default=None)
    next_larger = min((one for one in trials if one.status != TRAINS), key=_size, default=rejected)
    assert next_larger is not None, "the search ends at a batch that does not train"
    found = SearchResult(trials=tuple(sorted({*trials, next_larger}, key=_size)), best=best, next_larger=next_larger)
    title = f"# {start.name}: largest batch\n\n"
    write_text(search.folder / CSV, csv_table(found.rows))
    write_text(search.folder / MARKDOWN, title + markdown_table(found.rows))
    return found


def _check_limit(planned: PlannedTraining, limit: int | None) -> None:
    """Raise DoesNotFitError where the estimate of a known network exceeds a worker's share of the limit."""
    workload, peak = planned.plan.request.workload, planned.plan.workers[0].memory_bytes
    share = None if limit is None else limit // planned.ppn
    if workload is not None and not workload.assumed and peak is not None and share is not None and peak > share:
        raise DoesNotFitError(
            f"{workload.name} with {planned.recipe.batch.local} images per step needs {peak / GIB:.2f} GiB; "
            f"--memory leaves {share / GIB:.2f} GiB to each of {counted(planned.ppn, 'worker')}",
            largest=largest_batch(workload, share),
        )


def _size(trial: Trial) -> int:
    return trial.local_batch


def _most(smallest: PlannedTraining, error: InputError) -> int:
    """The largest possible local batch, after a larger one was rejected for its memory or the images of an epoch."""
    if isinstance(error, DoesNotFitError):
        return error.largest
    return smallest.sizes.images_per_epoch // smallest.sizes.global_batch  # of `smallest`, whose local batch is 1


def _rejected(batch: int, smallest: PlannedTraining, error: InputError) -> Trial:
    workload = smallest.plan.request.workload
    return Trial(
        local_batch=batch,
        global_batch=batch * smallest.sizes.global_batch,
        memory="",
        estimate_bytes=None if workload is None or workload.assumed else footprint(workload, batch).total,
        peak_bytes=None,
        status=DOES_NOT_FIT if isinstance(error, DoesNotFitError) else INVALID,
        ended_by=str(error),
    )


def _room(planned: PlannedTraining, limit: int | None) -> str:
    """The workers and the memory available to them."""
    plan, machine = planned.plan, planned.plan.machine
    total = sum(node.memory_bytes for node in machine.numa_nodes)
    limits = [f"{total / GIB:.1f} GiB in this machine"]
    if limit is not None:
        limits.append(f"--memory {limit / GIB:g} GiB (RLIMIT_DATA)")
    elif machine.memory_limit_bytes is not None:
        limits.append(f"{machine.memory_limit_bytes / GIB:.1f} GiB in this control group")
    workload = plan.request.workload
    known = "" if workload is None or not workload.assumed else f"; the planner has no estimate for {workload.name}"
    return f"{counted(planned.ppn, 'worker')}, {', '.join(limits)}{known}"


def _gib(value: int | None) -> str:
    return "" if value is None else f"{value / GIB:.2f}"


def _row(trial: Trial) -> tuple[str, ...]:
    return (
        f"{trial.local_batch}",
        f"{trial.global_batch}",
        trial.memory,
        _gib(trial.estimate_bytes),
        _gib(trial.peak_bytes),
        trial.status,
        trial.ended_by,
    )
