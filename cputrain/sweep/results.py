"""What came of a sweep's trainings, read from their folders."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from cputrain.launch.local import Planned
from cputrain.recipe.derivation import largest_local_batch
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import read_events, written_events
from cputrain.sweep.endings import DIVERGED, DONE, STOPPED
from cputrain.sweep.record import Record, read_record
from cputrain.sweep.variants import Variant

Event = dict[str, Any]
IMAGES = "images"  # what the data is where the start event does not say otherwise
MOST_POINTS = 100  # of a loss curve; means of what lies between
LOST = 10.0  # times the first step's loss: one that stays above it has diverged


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a training was asked for; None where a plan that was refused would have decided it."""

    workers: int | None
    local_batch: int | None
    global_batch: int | None
    epochs: int
    optimizer: str
    weight_decay: float
    peak_rate: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a training; accuracies in percent, None where there are none.

    `epochs`, `top1s`, `eval_steps` and `elapsed_s` (seconds since the training's first event, pauses between its starts
    left out) are those of its evaluations; `losses` are (step, training loss) up to where it diverged. `seconds` is the
    time to train, `wall_s` the whole job with its starts and ends, `requested_s` the limit that --time gave it; `data`
    is what it was trained on: images, or data that was made up.
    """

    label: str
    run: str
    settings: tuple[tuple[str, str], ...]
    status: str
    setup: Setup
    ended_by: str = ""
    steps: int | None = None
    epochs: tuple[int, ...] = ()
    top1s: tuple[float, ...] = ()
    eval_steps: tuple[int, ...] = ()
    elapsed_s: tuple[float, ...] = ()
    losses: tuple[tuple[int, float], ...] = ()
    top1: float | None = None
    top5: float | None = None
    train_top1: float | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    images_per_s: float | None = None
    epoch_s: float | None = None
    seconds: float | None = None
    wall_s: float | None = None
    requested_s: float | None = None
    data: str = IMAGES

    @property
    def best(self) -> tuple[float, int] | None:
        """The highest validation top-1 and the step after which it was first there."""
        scored = zip(self.top1s, self.eval_steps, strict=True)
        return max(scored, key=lambda pair: (pair[0], -pair[1]), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Trainings that differ by their seeds alone."""

    label: str
    results: tuple[Result, ...]

    @property
    def top1s(self) -> tuple[float, ...]:
        """Final top-1 of those that ended well."""
        return tuple(result.top1 for result in self.results if result.top1 is not None)


def grouped(results: Iterable[Result]) -> tuple[Group, ...]:
    """Results by label, in the order of the first of each."""
    by_label: dict[str, list[Result]] = {}
    for result in results:
        by_label.setdefault(result.label, []).append(result)
    return tuple(Group(label=label, results=tuple(each)) for label, each in by_label.items())


def setup_of(planned: Planned) -> Setup:
    """What a planned training comes to."""
    recipe, numbers = planned.recipe, planned.numbers
    return Setup(
        workers=planned.ppn,
        local_batch=largest_local_batch(recipe.batch, planned.ppn),
        global_batch=numbers.global_batch,
        epochs=recipe.epochs,
        optimizer=recipe.optim.name,
        weight_decay=recipe.optim.weight_decay,
        peak_rate=numbers.peak_rate,
    )


def refused_result(variant: Variant, recipe: Recipe, status: str, why: str) -> Result:
    """The row of a training that has not been started."""

    def number(value: object) -> Any:
        return None if isinstance(value, str) else value

    setup = Setup(
        workers=number(recipe.plan.ppn),
        local_batch=recipe.batch.local if recipe.batch.global_ is None else None,
        global_batch=recipe.batch.global_,
        epochs=recipe.epochs,
        optimizer=recipe.optim.name,
        weight_decay=recipe.optim.weight_decay,
        peak_rate=number(recipe.schedule.peak_rate) if recipe.schedule.rate_scaling in ("auto", "none") else None,
    )
    return Result(label=variant.label, run="", settings=variant.settings, status=status, ended_by=why, setup=setup)


def result_of(variant: Variant, setup: Setup, folder: Path) -> Result:
    """What a training left in its folder, so far."""
    events = read_events(folder)
    end = next((event for event in reversed(events) if event["event"] == "end"), None)
    done = end is not None and end["status"] == DONE
    record = read_record(folder) or Record(requested_s=None, used_s=None, status="", ended_by="")
    status = DONE if done else record.status or STOPPED
    steps = [event for event in events if event["event"] == "step"]
    epochs = [event for event in events if event["event"] == "epoch"]
    written = list(written_events(folder))  # steps that were lost and done again took their time, too
    since = dict(zip((event["time"] for event in written), elapsed(written), strict=True))
    judged = [(e, since[e["time"]]) for e in epochs if e.get("val_top1") is not None]
    start = next((event for event in events if event["event"] == "start"), {})
    last: Event = epochs[-1] if epochs else {}
    found = end or {}
    return Result(
        label=variant.label,
        run=str(folder),
        settings=variant.settings,
        status=status,
        ended_by="" if done else record.ended_by,
        setup=setup,
        steps=steps[-1]["step"] if steps else None,
        epochs=tuple(event["epoch"] for event, _ in judged),
        top1s=tuple(event["val_top1"] for event, _ in judged),
        eval_steps=tuple(event["step"] for event, _ in judged),
        elapsed_s=tuple(seconds for _, seconds in judged),
        losses=loss_curve([(event["step"], event["loss"]) for event in steps]),
        top1=found["top1"] if done else None,
        top5=found["top5"] if done else None,
        train_top1=last.get("train_top1"),
        train_loss=last.get("train_loss"),
        val_loss=next((e["val_loss"] for e in reversed(epochs) if e.get("val_loss") is not None), None),
        images_per_s=median(event["images_per_s"] for event in epochs) if epochs else None,
        epoch_s=median(event["seconds"] for event in epochs) if epochs else None,
        seconds=found.get("time_to_train_s") if done else None,
        wall_s=record.used_s if record.used_s is not None else found.get("wall_time_s"),
        requested_s=record.requested_s,
        data=start.get("data", IMAGES),
    )


def elapsed(events: Sequence[Event]) -> list[float]:
    """Seconds from the first event to each; what lies between a stop and the next start counts for nothing."""
    since = [0.0] if events else []
    for before, event in pairwise(events):
        pause = event["event"] == "start"
        since.append(since[-1] + (0.0 if pause else max(event["time"] - before["time"], 0.0)))
    return since


def diverged_from(losses: Sequence[float | None]) -> int | None:
    """Index of the first loss that, with all after it, is no number or more than LOST times the first; None if there
    is no such."""
    first = next((loss for loss in losses if loss is not None), math.inf)
    index = len(losses)
    while index and _is_lost(losses[index - 1], first):
        index -= 1
    return index if index < len(losses) else None


def _is_lost(loss: float | None, first: float) -> bool:
    return loss is None or not loss <= LOST * first


def loss_curve(losses: Sequence[tuple[int, float | None]]) -> tuple[tuple[int, float], ...]:
    """At most MOST_POINTS of (step, loss), each the mean up to its step, ending where the loss diverges."""
    known = losses[: diverged_from([loss for _, loss in losses])]
    size = max(1, -(-len(known) // MOST_POINTS))
    points = []
    for first in range(0, len(known), size):
        part = known[first : first + size]
        finite = [loss for _, loss in part if loss is not None]
        if finite:
            points.append((part[-1][0], mean(finite)))
    return tuple(points)


def has_diverged(result: Result) -> bool:
    """Whether its loss ended as no number, or so high that its curve is cut off."""
    cut = bool(result.steps) and (not result.losses or result.losses[-1][0] < (result.steps or 0))
    return result.status == DIVERGED or cut
