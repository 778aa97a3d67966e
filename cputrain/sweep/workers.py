"""The same training with several numbers of workers, compared."""

from collections.abc import Sequence
from dataclasses import dataclass

from cputrain.sweep.results import DONE, IMAGES, RunResult
from cputrain.sweep.run import clock
from cputrain.sweep.variants import WORKERS, label_of

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


def comparison_rows(compared: Sequence[WorkerComparison]) -> list[tuple[str, ...]]:
    """The headings and one row for each training."""

    def text(value: float | None, spec: str) -> str:
        return "" if value is None else f"{value:{spec}}"

    head = (
        *("training", "workers", "global batch", "turnaround", "epoch s", "stable at epoch", "stable after s"),
        *("images/s", "speed-up", "efficiency %", "training accuracy %", "validation accuracy %", "status"),
    )
    body = [
        (
            row.training,
            str(row.workers),
            text(row.global_batch, ","),
            "" if row.turnaround_s is None else clock(row.turnaround_s),
            text(row.epoch_s, ".4g"),
            text(row.stable_epoch, "d"),
            text(row.stable_s, ".4g"),
            text(row.images_per_s, ",.0f"),
            text(row.speedup, ".2f"),
            text(None if row.efficiency is None else 100 * row.efficiency, ".0f"),
            text(row.train_top1, ".2f"),
            text(row.top1, ".2f"),
            row.status
            + (" (workers share cores)" if row.oversubscribed else "")
            + ("" if row.data == IMAGES else f" ({row.data})")
            + (f": {row.ended_by}" if row.ended_by else ""),
        )
        for row in compared
    ]
    one = len({row.training for row in compared}) == 1
    return [row[1:] if one else row for row in (head, *body)]
