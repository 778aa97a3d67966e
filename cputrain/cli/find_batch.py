"""cputrain sweep --find-batch: the largest local batch that trains here, by estimate and by trial."""

from pathlib import Path

import click

from affinity.errors import DoesNotFitError, InputError, RunError
from affinity.planner.workload import footprint, largest_batch
from affinity.units import GIB
from cputrain.files import write_atomic
from cputrain.launch.local import Planned, planned_here
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import BatchSection, SweepSection
from cputrain.sweep.endings import DOES_NOT_FIT, REFUSED
from cputrain.sweep.search import next_batch
from cputrain.sweep.tables import columns, csv_rows, markdown_rows
from cputrain.sweep.trial import STEPS, TRAINS, Trial, run_trial

HEAD = ("local batch", "global batch", "memory", "estimate GiB", "peak RSS GiB", "result", "ended by")
TRIAL = ("evaluate.every_epochs=null", "checkpoint.every_epochs=null", "max_steps=10")


def find_batch(recipe: str, settings: tuple[str, ...], folder: Path, *, memory_gib: float | None) -> int:
    """Try larger and larger local batches, each for a few steps in real processes, as far as the planner's estimate
    allows; say which is the largest that trains, and what ended the next. Raises RunError where none trains."""
    limit = None if memory_gib is None else round(memory_gib * GIB)
    base = load_recipe(recipe, settings)

    def planned(batch: int) -> Planned:
        made = load_recipe(recipe, (*settings, *TRIAL, f"output={folder / f'local-{batch}'}"))
        one = planned_here(made.model_copy(update={"batch": BatchSection(local=batch), "sweep": SweepSection()}))
        _check_limit(one, limit)
        return one

    smallest = planned(1)
    click.echo(f"{base.name}: {_room(smallest, limit)}; {STEPS} steps of each local batch")
    trials: list[Trial] = []
    refused, most = None, None
    while batch := next_batch({one.local_batch: one.status == TRAINS for one in trials}, base.batch.local, most):
        try:
            made = planned(batch)
            trials.append(run_trial(made, limit))
        except InputError as error:
            refused, most = _refused(batch, smallest, error), _most(smallest, error)
            if most >= batch:
                raise  # for another reason than its size
        else:
            peak = trials[-1].peak_bytes
            click.echo(f"batch.local={batch}: {trials[-1].status}" + (f", peak RSS {_gib(peak)} GiB" if peak else ""))
    best = max((one for one in trials if one.status == TRAINS), key=_size, default=None)
    ended = min((one for one in trials if one.status != TRAINS), key=_size, default=refused)
    assert ended is not None, "the search ends at a batch that does not train"
    rows = [HEAD, *map(_row, sorted({*trials, ended}, key=_size))]
    write_atomic(folder / "find-batch.csv", csv_rows(rows).encode())
    write_atomic(folder / "find-batch.md", f"# {base.name}: largest batch\n\n{markdown_rows(rows)}".encode())
    click.echo("\n" + columns([row[:-1] for row in rows]) + "\n")
    told = f"{ended.local_batch}: {ended.status}: {ended.ended_by}"
    if best is None:
        raise RunError(f"no batch trains, not even {told}")
    click.echo(
        f"largest that trains: batch.local={best.local_batch} (global batch {best.global_batch:,}) in {best.memory}\n"
        f"the next, {told}\n{folder / 'find-batch.md'}, {folder / 'find-batch.csv'}"
    )
    return 0


def _check_limit(planned: Planned, limit: int | None) -> None:
    """Raise DoesNotFitError where the estimate of a known network exceeds a worker's share of --memory."""
    workload, peak = planned.plan.request.workload, planned.plan.workers[0].memory_bytes
    share = None if limit is None else limit // planned.ppn
    if workload is not None and not workload.assumed and peak is not None and share is not None and peak > share:
        raise DoesNotFitError(
            f"{workload.name} with {planned.recipe.batch.local} images a step needs {peak / GIB:.2f} GiB; "
            f"--memory leaves each of {planned.ppn} worker(s) {share / GIB:.2f} GiB",
            largest=largest_batch(workload, share),
        )


def _size(trial: Trial) -> int:
    return trial.local_batch


def _most(smallest: Planned, error: InputError) -> int:
    """The largest local batch, given why a larger one was refused: by its memory, or by what an epoch holds."""
    if isinstance(error, DoesNotFitError):
        return error.largest
    return smallest.numbers.images_per_epoch // smallest.numbers.global_batch  # whose local batch is 1


def _refused(batch: int, smallest: Planned, error: InputError) -> Trial:
    workload = smallest.plan.request.workload
    return Trial(
        local_batch=batch,
        global_batch=batch * smallest.numbers.global_batch,
        memory="",
        estimate_bytes=None if workload is None or workload.assumed else footprint(workload, batch).total,
        peak_bytes=None,
        status=DOES_NOT_FIT if isinstance(error, DoesNotFitError) else REFUSED,
        ended_by=str(error),
    )


def _room(planned: Planned, limit: int | None) -> str:
    """Workers and the memory that they have."""
    plan, machine = planned.plan, planned.plan.machine
    total = sum(node.memory_bytes for node in machine.numa_nodes)
    limits = [f"{total / GIB:.1f} GiB in this machine"]
    if limit is not None:
        limits.append(f"--memory {limit / GIB:g} GiB (RLIMIT_DATA)")
    elif machine.memory_limit_bytes is not None:
        limits.append(f"{machine.memory_limit_bytes / GIB:.1f} GiB in this control group")
    workload = plan.request.workload
    known = "" if workload is None or not workload.assumed else f"; the planner does not know {workload.name}"
    return f"{planned.ppn} worker(s), {', '.join(limits)}{known}"


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
