"""A training's events as tables and charts: loss, accuracy, learning rate, throughput, time of a step."""

from collections.abc import Mapping

import numpy as np

from cputrain.report.charts import FAINT, Chart, Line, drawn
from cputrain.report.run import Run, unit_of
from cputrain.report.tables import Table, table_of

STEP_FIELDS = ("loss", "rate", "images_per_s")
EPOCH_FIELDS = ("train_loss", "val_loss", "train_top1", "val_top1", "val_top5", "images_per_s")


def training_tables(run: Run) -> dict[str, Table]:
    """The steps and the epochs, and the seconds of rank 0's steps by what they were spent on."""
    steps, at = run.with_times("step")
    table = table_of(steps, STEP_FIELDS, at)
    waits = {name: table_of(steps, (name,), at)[name] for name in ("data_wait_s", "comm_wait_s")}
    global_batch = run.start.get("global_batch") or np.nan
    with np.errstate(divide="ignore"):
        seconds = np.where(table["images_per_s"] > 0, global_batch / table["images_per_s"], np.nan)
    compute = np.maximum(seconds - np.nan_to_num(waits["data_wait_s"]) - np.nan_to_num(waits["comm_wait_s"]), 0)
    return {
        "steps": table,
        "epochs": table_of(*_epochs(run)),
        "parts": {**{axis: table[axis] for axis in ("step", "epoch", "time")}, "compute_s": compute, **waits},
    }


def _epochs(run: Run) -> tuple[list[dict[str, object]], tuple[str, ...], list[float]]:
    """The last event of each epoch (a run that stops within an epoch and resumes writes two), with their times."""
    events, times = run.with_times("epoch")
    last = {event["epoch"]: (event, at) for event, at in zip(events, times, strict=True)}
    return [event for event, _ in last.values()], EPOCH_FIELDS, [at for _, at in last.values()]


def training_charts(run: Run, tables: Mapping[str, Table]) -> tuple[Chart, ...]:
    """The charts of a training, without those that have no values."""
    unit = unit_of(run.start)

    def step(y: str, label: str = "each step") -> Line:
        return Line(label=label, table="steps", y=y, kind=FAINT, smooths=True)

    def epoch(y: str, label: str) -> Line:
        return Line(label=label, table="epochs", y=y)

    charts = (
        Chart(
            id="loss",
            title="Loss",
            unit="",
            lines=(step("loss"), epoch("train_loss", "training"), epoch("val_loss", "validation")),
        ),
        Chart(
            id="accuracy",
            title="Accuracy",
            unit="%",
            lines=(
                epoch("train_top1", "training top-1"),
                epoch("val_top1", "validation top-1"),
                epoch("val_top5", "validation top-5"),
            ),
        ),
        Chart(
            id="rate",
            title="Learning rate",
            unit="",
            lines=(Line(label="learning rate", table="steps", y="rate"),),
            from_zero=True,
        ),
        Chart(
            id="throughput",
            title="Throughput",
            unit=f"{unit}/s",
            lines=(step("images_per_s"), epoch("images_per_s", "mean of the epoch")),
            from_zero=True,
        ),
        Chart(
            id="parts",
            title="Time of rank 0's steps",
            unit="s",
            lines=tuple(
                Line(label=label, table="parts", y=y, smooths=True)
                for y, label in (
                    ("compute_s", "compute"),
                    ("comm_wait_s", "communication wait"),
                    ("data_wait_s", "data wait"),
                )
            ),
            from_zero=True,
        ),
    )
    return tuple(chart for each in charts if (chart := drawn(each, tables)) is not None)
