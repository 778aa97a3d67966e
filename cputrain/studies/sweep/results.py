"""Results of a sweep as tables, charts and files, and the comparison of worker counts."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from cputrain.affinity.wording import plural
from cputrain.files import write_text
from cputrain.rows import Column, Rows
from cputrain.runs.events import DIVERGENCE_FACTOR
from cputrain.runs.events import FILE as EVENTS
from cputrain.studies.svg import figure_svg, subplots
from cputrain.studies.sweep.trainings import (
    DONE,
    IMAGES,
    SEED,
    WORKERS,
    RunResult,
    SeedGroup,
    duration_text,
    group_by_seed,
    has_diverged,
    settings_label,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

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


ENDED_BY, FOLDER = "ended by", "result file"
# Requested settings; on a terminal, settings that all rows share are shown above the table.
REQUESTED = (
    Column("workers", "setup.workers", ",.0f"),
    Column("local batch", "setup.local_batch", ",.0f"),
    Column("global batch", "setup.global_batch", ",.0f"),
    Column("epochs", "setup.epochs", ",.0f"),
    Column("weight decay", "setup.weight_decay", "g"),
    Column("optimizer", "setup.optimizer"),
    Column("peak rate", "setup.peak_rate", "g"),
    Column("other settings", lambda r: settings_label(r.settings, without=SHOWN_KEYS) or None),
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
    Column("walltime requested", "requested_s", duration_text),
    Column("walltime used", "wall_s", duration_text),
    Column("data", lambda r: None if r.data == IMAGES else r.data),
    Column("status", "status"),
    Column(ENDED_BY, lambda r: r.ended_by or None),
    Column(FOLDER, lambda r: f"{r.run}/{EVENTS}" if r.run else None),
)
COLUMNS = (*REQUESTED, *ACHIEVED)
NEAR, DROP = 0.5, 1.0  # points of validation top-1
RULE = (
    f"stable maximum: the first epoch within {NEAR:g} points of the best validation accuracy of all epochs, "
    f"after which it never falls more than {DROP:g} point below that epoch's"
)
BASELINE_NOTE = (
    "speed-up: images/s relative to the fewest workers; efficiency: images/s per worker, relative to the same"
)
OVERSUBSCRIBE = "plan.oversubscribe"
MAX_LEGEND_LINES = 24  # lines in a legend; if there are more, it has one entry per optimizer
DECADE = 10.0  # ratio of losses, above which their axis is logarithmic
PALEST = 0.65  # fraction of white in the color of an optimizer's last line
DASHES = ("-", "--", ":", "-.")

Style = tuple[tuple[float, ...], str]  # color, dashes
RESULTS, PICTURE, CSV, MARKDOWN = "sweep.json", "sweep.svg", "sweep.csv", "sweep.md"


def results_text(groups: Sequence[SeedGroup]) -> str:
    """Format one line per group, numbers as mean and range over the seeds, without empty columns.

    Settings that all groups share are printed above; the causes of unfinished trainings below.
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
    """Return one row per group, without empty columns. A cell has the value if all seeds share it, else mean and range,
    or for texts the number of seeds with each."""

    def cell(column: Column, group: SeedGroup) -> str:
        values = [value for result in group.results if (value := column.of(result)) is not None]
        if len(set(values)) < 2:
            return column.text_of(values[0]) if values else ""
        if isinstance(values[0], str):
            return ", ".join(f"{count} {text}" if count > 1 else text for text, count in Counter(values).items())
        return f"{column.text_of(mean(values))} ({column.text_of(min(values))}-{column.text_of(max(values))})"

    return Rows(tuple(Column(column.name, partial(cell, column)) for column in COLUMNS), groups).filled()


def csv_text(results: Sequence[RunResult]) -> str:
    """Format one row per training, with every column; durations as H:MM:SS, other numbers unrounded."""
    seed = Column("seed", lambda r: dict(r.settings).get(SEED, ""))
    plain = (replace(column, text=duration_text if column.text is duration_text else str) for column in COLUMNS)
    return Rows((seed, *plain), results).csv()


def spread_text(values: Sequence[float]) -> str:
    """Format the mean, and the range if there are several values: "98.41 (98.30-98.52)"."""
    if not values:
        return ""
    several = f" ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else ""
    return f"{mean(values):.2f}{several}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerComparison:
    """One training of a comparison; accuracies in percent, None if there is no value.

    `turnaround_s` is the time of the whole job, `epoch_s` the median time of an epoch; `stable_epoch` and `stable_s`
    are the epoch and the time at which validation accuracy reached its stable maximum. The speed-up is None for workers
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


def stable_maximum(values: Sequence[float]) -> int | None:
    """Return the index of the first value that is within NEAR of the largest and is followed by no value more than
    DROP below it; None if there is no such value."""
    top = max(values, default=0.0)
    lowest_after = float("inf")
    epoch = None
    for index in reversed(range(len(values))):
        if values[index] >= top - NEAR and lowest_after >= values[index] - DROP:
            epoch = index
        lowest_after = min(lowest_after, values[index])
    return epoch


def compare_workers(results: Sequence[RunResult]) -> tuple[WorkerComparison, ...]:
    """Compare trainings that differ only in their number of workers, relative to the fewest workers."""
    trainings: dict[str, list[RunResult]] = {}
    for result in results:
        if result.setup.workers is not None:
            trainings.setdefault(settings_label(result.settings, without=(WORKERS, OVERSUBSCRIBE)), []).append(result)
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
    """Return one row per compared training; the column "training" is omitted if there is only one."""

    def status(row: WorkerComparison) -> str:
        shared = " (workers share cores)" if row.oversubscribed else ""
        data = "" if row.data == IMAGES else f" ({row.data})"
        return f"{row.status}{shared}{data}" + (f": {row.ended_by}" if row.ended_by else "")

    columns = (
        Column("training", "training"),
        Column("workers", "workers"),
        Column("global batch", "global_batch", ","),
        Column("turnaround", "turnaround_s", duration_text),
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


def sweep_chart(title: str, groups: Sequence[SeedGroup]) -> str:
    """Draw validation top-1 and training loss over steps as SVG: one line per group, mean and range over its seeds.

    Each optimizer has a color, which gets paler from group to group.
    """
    styles = _styles(groups)
    scored = [group for group in groups if any(result.top1s for result in group.results)]
    trained = [group for group in groups if any(result.losses for result in group.results)]
    panels = [draw for draw, drawn in ((_accuracies, scored), (_losses, trained)) if drawn]
    count = max(len(panels), 1)
    figure, axes = subplots(1, count, figsize=(6.5 * count + 2.5, 4.8), squeeze=False)
    for draw, panel in zip(panels, axes[0], strict=False):
        draw(panel, groups, styles)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    handles, labels = _legend(axes[0][len(panels) - 1], groups) if panels else ([], [])
    if handles:
        figure.legend(handles, labels, fontsize="small", loc="outside right upper")
    figure.suptitle(_titled(title, [result.data for group in groups for result in group.results]))
    return figure_svg(figure)


def _titled(title: str, data: Sequence[str]) -> str:
    """Return the title, followed by the kind of data if it is not images."""
    kinds = ", ".join(sorted({*data} - {IMAGES}))
    return f"{title} ({kinds})" if kinds else title


def optimizer_of(group: SeedGroup) -> str:
    """Return the optimizer that the group's trainings use."""
    return group.results[0].setup.optimizer


def _styles(groups: Sequence[SeedGroup]) -> dict[str, Style]:
    """Return a color per optimizer with shades and dashes per group, or a color per group if there is one optimizer."""
    from matplotlib.colors import to_rgb

    optimizers = list(dict.fromkeys(map(optimizer_of, groups)))
    styles: dict[str, Style] = {}
    for hue, optimizer in enumerate(optimizers):
        same_optimizer = [group for group in groups if optimizer_of(group) == optimizer]
        for number, group in enumerate(same_optimizer):
            if len(optimizers) == 1:
                styles[group.label] = (to_rgb(f"C{number % 10}"), DASHES[number // 10 % len(DASHES)])
                continue
            white = PALEST * number / max(len(same_optimizer) - 1, 1)
            shade = tuple(part + (1 - part) * white for part in to_rgb(f"C{hue % 10}"))
            styles[group.label] = (shade, DASHES[number % len(DASHES)])
    return styles


def _legend_label(group: SeedGroup) -> str:
    label = group.label or optimizer_of(group)  # empty if trainings differ only in their seed
    if all(not result.steps for result in group.results):
        return f"{label} ({group.results[0].status})"
    diverged = [result for result in group.results if has_diverged(result)]
    if not diverged:
        return label
    at = diverged[0].losses[-1][0] if diverged[0].losses else 0
    return f"{label} (diverged after step {at:,})"


def _accuracies(axes: "Axes", groups: Sequence[SeedGroup], styles: dict[str, Style]) -> None:
    for group in groups:
        _line(axes, group, styles, [tuple(zip(r.eval_steps, r.top1s, strict=True)) for r in group.results], marker=".")
    axes.set_xlim(left=0)
    axes.set_ylabel("validation top-1, percent")


def _losses(axes: "Axes", groups: Sequence[SeedGroup], styles: dict[str, Style]) -> None:
    """Draw losses up to DIVERGENCE_FACTOR times the highest first loss; log scale if they span more than a decade."""
    shown = []
    for group in groups:
        curves = [result.losses for result in group.results]
        _line(axes, group, styles, curves, marker="")
        for result in group.results:
            if has_diverged(result) and result.losses:
                axes.plot(*result.losses[-1], marker="x", color=styles[group.label][0])
        shown += [loss for curve in curves for _, loss in curve]
    top = DIVERGENCE_FACTOR * max(result.losses[0][1] for group in groups for result in group.results if result.losses)
    positive = [loss for loss in shown if 0 < loss <= top]
    if positive and min(shown) > 0 and max(positive) > DECADE * min(positive):
        axes.set_yscale("log")
    if max(shown) > top > 0:
        axes.set_ylim(top=top)
    axes.set_ylabel("training loss")


def _line(
    axes: "Axes",
    group: SeedGroup,
    styles: dict[str, Style],
    curves: Sequence[Sequence[tuple[int, float]]],
    marker: str,
) -> None:
    """Draw the mean and the range of a group's curves, up to the end of the shortest; an empty line without curves."""
    color, dashes = styles[group.label]
    begun = [curve for curve in curves if curve]
    steps = [step for step, _ in min(begun, key=len)] if begun else []
    columns = [[curve[i][1] for curve in begun] for i in range(len(steps))]
    means = [mean(column) for column in columns]
    axes.plot(steps, means, marker=marker, color=color, linestyle=dashes, linewidth=1.3, label=_legend_label(group))
    if len(begun) > 1:
        axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.2)


def _legend(axes: "Axes", groups: Sequence[SeedGroup]) -> "tuple[list[Artist], list[str]]":
    """Return one entry per group, ordered by optimizer; with more than MAX_LEGEND_LINES groups one per optimizer."""
    handles, labels = axes.get_legend_handles_labels()
    entries = [(optimizer_of(group), h, label) for group, h, label in zip(groups, handles, labels, strict=True)]
    optimizers = list(dict.fromkeys(optimizer for optimizer, _, _ in entries))
    entries.sort(key=lambda entry: optimizers.index(entry[0]))
    if len(entries) > MAX_LEGEND_LINES:
        first = {optimizer: handle for optimizer, handle, _ in reversed(entries)}
        return [first[name] for name in optimizers], [f"{name}, all settings" for name in optimizers]
    return [handle for _, handle, _ in entries], [label for _, _, label in entries]


def workers_chart(title: str, results: Sequence[RunResult], compared: Sequence[WorkerComparison]) -> str:
    """Draw as SVG: validation top-1 over epochs, one line per training with its stable maximum marked; and the epochs
    to the stable maximum over the number of workers."""
    from matplotlib.ticker import MaxNLocator

    figure, (curves, bars) = subplots(1, 2, figsize=(12, 4.6), width_ratios=(3, 2))
    trainings = list(dict.fromkeys(row.training for row in compared))
    for number, training in enumerate(trainings):
        rows = [row for row in compared if row.training == training]
        for row in rows:
            _accuracy_line(curves, row, results, DASHES[number % len(DASHES)])
        stable = [(row.workers, row.stable_epoch) for row in rows if row.stable_epoch is not None]
        bars.plot([w for w, _ in stable], [e for _, e in stable], marker="o", label=training or None)
    curves.set(xlabel="epoch", ylabel="validation top-1, percent", title="o: stable maximum")
    counts = sorted({row.workers for row in compared})
    bars.set_xticks(counts, [str(count) for count in counts])
    bars.set(xlabel="workers", ylabel="epochs to the stable maximum")
    bars.set_ylim(bottom=0)
    for axis in (curves.xaxis, bars.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    for axes in (curves, bars):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.suptitle(_titled(title, [row.data for row in compared]))
    return figure_svg(figure)


def _accuracy_line(axes: "Axes", row: WorkerComparison, results: Sequence[RunResult], dashes: str) -> None:
    result = next((r for r in results if r.run == row.run), None)
    if result is None or not result.top1s:
        return
    label = f"{plural(row.workers, 'worker')} {row.training}".strip()
    (line,) = axes.plot(result.epochs, result.top1s, linestyle=dashes, marker=".", label=label)
    if row.stable_epoch is not None:
        top1 = result.top1s[result.epochs.index(row.stable_epoch)]
        axes.plot(row.stable_epoch, top1, marker="o", markersize=9, fillstyle="none", color=line.get_color())


def results_as_json(name: str, results: Sequence[RunResult]) -> dict[str, Any]:
    """Return a sweep as plain values for JSON: the recipe's name and each training's result."""
    return {"recipe": name, "runs": [asdict(result) for result in results]}


def write_results(folder: Path, name: str, results: Sequence[RunResult]) -> None:
    """Write sweep.json, .csv, .md and .svg; and workers.* if numbers of workers were compared."""
    groups = group_by_seed(results)
    write_text(folder / RESULTS, json.dumps(results_as_json(name, results), indent=1))
    write_text(folder / CSV, csv_text(results))
    write_text(folder / MARKDOWN, f"# {name}\n\n{by_group(groups).markdown()}\n![curves]({PICTURE})\n")
    write_text(folder / PICTURE, sweep_chart(name, groups))
    compared = compare_workers(results)
    if compared:
        plain = Rows(tuple(Column(field.name, field.name, str) for field in fields(WorkerComparison)), compared)
        data = {"recipe": name, "rule": RULE, "trainings": plain.json()}
        shown, notes = comparison_rows(compared).markdown(), f"{RULE}; {BASELINE_NOTE}"
        write_text(folder / "workers.json", json.dumps(data, indent=1))
        write_text(folder / "workers.csv", plain.csv())
        write_text(folder / "workers.md", f"# {name}: workers compared\n\n{shown}\n{notes}\n\n![curves](workers.svg)\n")
        write_text(folder / "workers.svg", workers_chart(name, results, compared))
