"""Results of a sweep as text, CSV, JSON and Markdown; the same training with several numbers of workers, compared."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from statistics import mean
from typing import Any

from cputrain.rows import Column, Rows
from cputrain.runs.events import FILE as EVENTS
from cputrain.sweep.trainings import DONE, IMAGES, SEED, WORKERS, RunResult, SeedGroup, clock, label_of

SHOWN_KEYS = (
    SEED,
    WORKERS,
    "batch.local",
    "batch.global",
    "epochs",
    "optim.name",
    "optim.weight_decay",
    "schedule.peak_rate",
)


def _setting(name: str) -> Callable[[RunResult], Any]:
    return attrgetter(f"setup.{name}")


ENDED_BY, FOLDER = "ended by", "result file"
# What was asked for: a terminal shows it above the table where all rows share it.
REQUESTED = (
    Column("workers", _setting("workers"), ",.0f"),
    Column("local batch", _setting("local_batch"), ",.0f"),
    Column("global batch", _setting("global_batch"), ",.0f"),
    Column("epochs", _setting("epochs"), ",.0f"),
    Column("weight decay", _setting("weight_decay"), "g"),
    Column("optimizer", _setting("optimizer")),
    Column("peak rate", _setting("peak_rate"), "g"),
    Column("other settings", lambda r: label_of(r.settings, without=SHOWN_KEYS) or None),
)
ACHIEVED = (
    Column("steps", "steps", ",.0f"),
    Column("max accuracy %", lambda r: r.best and r.best[0], ".2f"),
    Column("at step", lambda r: r.best and r.best[1], ",.0f"),
    Column("final accuracy %", "top1", ".2f"),
    Column("training loss", "train_loss", ".4g"),
    Column("validation loss", "val_loss", ".4g"),
    Column("images/s", "images_per_s", ",.0f"),
    Column("time to train s", "seconds", ".4g"),
    Column("walltime requested", "requested_s", clock),
    Column("walltime used", "wall_s", clock),
    Column("data", lambda r: None if r.data == IMAGES else r.data),
    Column("status", "status"),
    Column(ENDED_BY, lambda r: r.ended_by or None),
    Column(FOLDER, lambda r: f"{r.run}/{EVENTS}" if r.run else None),
)
COLUMNS = (*REQUESTED, *ACHIEVED)


def table(groups: Sequence[SeedGroup]) -> str:
    """One line for each group, numbers as mean and range over its seeds, without empty columns.

    Settings that all groups share stand above; the causes of trainings that did not finish stand below.
    """
    shown = by_group(groups).without(ENDED_BY, FOLDER)
    heads, *lines = shown.cells
    settings = {column.name for column in REQUESTED}
    same = [
        i for i, head in enumerate(heads) if head in settings and len({line[i] for line in lines}) == 1 < len(lines)
    ]
    above = f"all with {', '.join(f'{heads[i]} {lines[0][i]}' for i in same)}\n" if same else ""
    ended = dict.fromkeys(
        f"\n{r.label or r.run}: {r.status}: {r.ended_by}" for group in groups for r in group.results if r.ended_by
    )
    return above + shown.without(*(heads[i] for i in same)).text() + "".join(ended)


def by_group(groups: Sequence[SeedGroup]) -> Rows:
    """A row for each group, without empty columns; a cell is the value, or mean and range where seeds differ, and texts
    are counted."""

    def cell(column: Column, group: SeedGroup) -> str:
        values = [value for result in group.results if (value := column.of(result)) is not None]
        if len(set(values)) < 2:
            return column.text_of(values[0]) if values else ""
        if isinstance(values[0], str):
            return ", ".join(f"{count} {text}" if count > 1 else text for text, count in Counter(values).items())
        return f"{column.text_of(mean(values))} ({column.text_of(min(values))}-{column.text_of(max(values))})"

    return Rows(tuple(Column(column.name, partial(cell, column)) for column in COLUMNS), groups).filled()


def csv_text(results: Sequence[RunResult]) -> str:
    """One row for each training, with every column; durations as H:MM:SS, other numbers unrounded."""
    seed = Column("seed", lambda r: dict(r.settings).get(SEED, ""))
    plain = (replace(column, text=clock if column.text is clock else str) for column in COLUMNS)
    return Rows((seed, *plain), results).csv()


def spread(values: Sequence[float]) -> str:
    """Mean, and the range where there are several values: "98.41 (98.30-98.52)"."""
    if not values:
        return ""
    several = f" ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else ""
    return f"{mean(values):.2f}{several}"


NEAR, DROP = 0.5, 1.0  # points of validation top-1
RULE = (
    f"stable maximum: the first epoch whose validation accuracy is within {NEAR:g} points of the best of all epochs "
    f"and after which it never falls more than {DROP:g} point below that epoch's"
)
FEWEST = "speed-up: images/s relative to the fewest workers; efficiency: the same per worker"
OVERSUBSCRIBE = "plan.oversubscribe"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerComparison:
    """One training of a comparison; accuracies in percent, None where there is no value.

    `turnaround_s` is the time of the whole job, `epoch_s` that of the median epoch; `stable_epoch` and `stable_s` are
    the epoch and the time at which validation accuracy reached its stable maximum. There is no speed-up for workers
    that share cores (`oversubscribed`).
    """

    training: str
    workers: int
    global_batch: int | None
    turnaround_s: float | None
    epoch_s: float | None
    stable_epoch: int | None
    stable_s: float | None
    images_per_s: float | None
    speedup: float | None
    efficiency: float | None
    train_top1: float | None
    top1: float | None
    oversubscribed: bool
    status: str
    ended_by: str
    data: str
    run: str


def stable_maximum(values: Sequence[float], *, near: float = NEAR, drop: float = DROP) -> int | None:
    """Index of the first value within `near` of the largest and after which none is more than `drop` below it; None
    where every such value is followed by a deeper fall."""
    top = max(values, default=0.0)
    lowest_after = float("inf")
    found = None
    for index in reversed(range(len(values))):
        if values[index] >= top - near and lowest_after >= values[index] - drop:
            found = index
        lowest_after = min(lowest_after, values[index])
    return found


def compare(results: Sequence[RunResult]) -> tuple[WorkerComparison, ...]:
    """Trainings that differ only in their number of workers, each relative to the one with the fewest."""
    trainings: dict[str, list[RunResult]] = {}
    for result in results:
        if result.setup.workers is not None:
            trainings.setdefault(label_of(result.settings, without=(WORKERS, OVERSUBSCRIBE)), []).append(result)
    return tuple(
        row
        for training, group in trainings.items()
        if len({_workers(result) for result in group}) > 1
        for row in _against_fewest(training, sorted(group, key=_workers))
    )


def _workers(result: RunResult) -> int:
    return result.setup.workers or 0


def _against_fewest(training: str, results: list[RunResult]) -> list[WorkerComparison]:
    base = next((result for result in results if result.images_per_s), None)
    rows = []
    for result in results:
        index = stable_maximum(result.top1s) if result.status == DONE else None
        speedup = efficiency = None
        oversubscribed = dict(result.settings).get(OVERSUBSCRIBE) == "true"
        if base is not None and base.images_per_s and result.images_per_s and not oversubscribed:
            speedup = result.images_per_s / base.images_per_s
            efficiency = speedup * _workers(base) / _workers(result)
        rows.append(
            WorkerComparison(
                training=training,
                workers=_workers(result),
                global_batch=result.setup.global_batch,
                turnaround_s=result.wall_s,
                epoch_s=result.epoch_s,
                stable_epoch=None if index is None else result.epochs[index],
                stable_s=None if index is None else result.elapsed_s[index],
                images_per_s=result.images_per_s,
                speedup=speedup,
                efficiency=efficiency,
                train_top1=result.train_top1,
                top1=result.top1s[-1] if result.top1s else None,
                oversubscribed=oversubscribed,
                status=result.status,
                ended_by=result.ended_by,
                data=result.data,
                run=result.run,
            )
        )
    return rows


def comparison_rows(compared: Sequence[WorkerComparison]) -> Rows:
    """A row for each training of a comparison, named where there are several."""

    def status(row: WorkerComparison) -> str:
        shared = " (workers share cores)" if row.oversubscribed else ""
        data = "" if row.data == IMAGES else f" ({row.data})"
        return f"{row.status}{shared}{data}" + (f": {row.ended_by}" if row.ended_by else "")

    columns = (
        Column("training", "training"),
        Column("workers", "workers"),
        Column("global batch", "global_batch", ","),
        Column("turnaround", "turnaround_s", clock),
        Column("epoch s", "epoch_s", ".4g"),
        Column("stable at epoch", "stable_epoch"),
        Column("stable after s", "stable_s", ".4g"),
        Column("images/s", "images_per_s", ",.0f"),
        Column("speed-up", "speedup", ".2f"),
        Column("efficiency %", lambda row: None if row.efficiency is None else 100 * row.efficiency, ".0f"),
        Column("training accuracy %", "train_top1", ".2f"),
        Column("validation accuracy %", "top1", ".2f"),
        Column("status", status),
    )
    return Rows(columns[1:] if len({row.training for row in compared}) == 1 else columns, compared)
