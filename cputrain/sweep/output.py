"""A sweep's files: results as JSON, tables and charts."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from cputrain.affinity.wording import counted
from cputrain.files import write_text
from cputrain.rows import Column, Rows, figure_svg, subplots
from cputrain.runs.events import DIVERGENCE_FACTOR
from cputrain.sweep.tables import FEWEST, RULE, WorkerComparison, by_group, compare, comparison_rows, csv_text
from cputrain.sweep.trainings import IMAGES, RunResult, SeedGroup, group_by_seed, has_diverged

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

MOST_NAMED = 24  # lines in a legend; with more, one entry for each optimizer
DECADE = 10.0
PALEST = 0.65  # share of white in the color of an optimizer's last line
DASHES = ("-", "--", ":", "-.")

Style = tuple[tuple[float, ...], str]  # color, dashes


def sweep_chart(title: str, groups: Sequence[SeedGroup]) -> str:
    """SVG of validation top-1 and of training loss over steps: one line for each group, mean and range of its seeds.

    Each optimizer has a color, which gets paler from group to group.
    """
    styles = _styles(groups)
    scored = [group for group in groups if any(result.top1s for result in group.results)]
    trained = [group for group in groups if any(result.losses for result in group.results)]
    panels = [draw for draw, those in ((_accuracies, scored), (_losses, trained)) if those]
    count = max(len(panels), 1)
    figure, axes = subplots(1, count, figsize=(6.5 * count + 2.5, 4.8), squeeze=False)
    for draw, place in zip(panels, axes[0], strict=False):
        draw(place, groups, styles)
        place.set_xlabel("step")
        place.grid(alpha=0.3)
    handles, labels = _legend(axes[0][len(panels) - 1], groups) if panels else ([], [])
    if handles:
        figure.legend(handles, labels, fontsize="small", loc="outside right upper")
    figure.suptitle(_titled(title, [result.data for group in groups for result in group.results]))
    return figure_svg(figure)


def _titled(title: str, data: Sequence[str]) -> str:
    """The title, with the kind of data where that is not images."""
    other = ", ".join(sorted({*data} - {IMAGES}))
    return f"{title} ({other})" if other else title


def optimizer_of(group: SeedGroup) -> str:
    """The optimizer of its trainings."""
    return group.results[0].setup.optimizer


def _styles(groups: Sequence[SeedGroup]) -> dict[str, Style]:
    """A color for each optimizer, or for each group where there is one optimizer only; shades and dashes within it."""
    from matplotlib.colors import to_rgb

    optimizers = list(dict.fromkeys(map(optimizer_of, groups)))
    styles: dict[str, Style] = {}
    for hue, optimizer in enumerate(optimizers):
        own = [group for group in groups if optimizer_of(group) == optimizer]
        for number, group in enumerate(own):
            if len(optimizers) == 1:
                styles[group.label] = (to_rgb(f"C{number % 10}"), DASHES[number // 10 % len(DASHES)])
                continue
            white = PALEST * number / max(len(own) - 1, 1)
            shade = tuple(part + (1 - part) * white for part in to_rgb(f"C{hue % 10}"))
            styles[group.label] = (shade, DASHES[number % len(DASHES)])
    return styles


def _legend_label(group: SeedGroup) -> str:
    label = group.label or optimizer_of(group)  # where trainings differ only in their seed
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
    """Up to DIVERGENCE_FACTOR times the highest first loss; a logarithmic scale where they span more than a decade."""
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
    """The mean of a group's curves and their range, up to the end of the shortest; an empty line without curves."""
    color, dashes = styles[group.label]
    begun = [curve for curve in curves if curve]
    steps = [step for step, _ in min(begun, key=len)] if begun else []
    columns = [[curve[i][1] for curve in begun] for i in range(len(steps))]
    means = [mean(column) for column in columns]
    axes.plot(steps, means, marker=marker, color=color, linestyle=dashes, linewidth=1.3, label=_legend_label(group))
    if len(begun) > 1:
        axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.2)


def _legend(axes: "Axes", groups: Sequence[SeedGroup]) -> "tuple[list[Artist], list[str]]":
    """One entry for each group, ordered by optimizer; with more than MOST_NAMED groups one for each optimizer."""
    handles, labels = axes.get_legend_handles_labels()
    entries = [(optimizer_of(group), h, label) for group, h, label in zip(groups, handles, labels, strict=True)]
    optimizers = list(dict.fromkeys(optimizer for optimizer, _, _ in entries))
    entries.sort(key=lambda entry: optimizers.index(entry[0]))
    if len(entries) > MOST_NAMED:
        first = {optimizer: handle for optimizer, handle, _ in reversed(entries)}
        return [first[name] for name in optimizers], [f"{name}, all settings" for name in optimizers]
    return [handle for _, handle, _ in entries], [label for _, _, label in entries]


def workers_chart(title: str, results: Sequence[RunResult], compared: Sequence[WorkerComparison]) -> str:
    """SVG of validation top-1 over epochs, with a line for each training and its stable maximum marked, and of the
    epochs to that maximum over the number of workers."""
    from matplotlib.ticker import MaxNLocator

    figure, (left, right) = subplots(1, 2, figsize=(12, 4.6), width_ratios=(3, 2))
    trainings = list(dict.fromkeys(row.training for row in compared))
    for number, training in enumerate(trainings):
        rows = [row for row in compared if row.training == training]
        for row in rows:
            _accuracy_line(left, row, results, DASHES[number % len(DASHES)])
        stable = [(row.workers, row.stable_epoch) for row in rows if row.stable_epoch is not None]
        right.plot([w for w, _ in stable], [e for _, e in stable], marker="o", label=training or None)
    left.set(xlabel="epoch", ylabel="validation top-1, percent", title="o: stable maximum")
    counts = sorted({row.workers for row in compared})
    right.set_xticks(counts, [str(count) for count in counts])
    right.set(xlabel="workers", ylabel="epochs to the stable maximum")
    right.set_ylim(bottom=0)
    for axis in (left.xaxis, right.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.suptitle(_titled(title, [row.data for row in compared]))
    return figure_svg(figure)


def _accuracy_line(axes: "Axes", row: WorkerComparison, results: Sequence[RunResult], dashes: str) -> None:
    result = next((r for r in results if r.run == row.run), None)
    if result is None or not result.top1s:
        return
    label = f"{counted(row.workers, 'worker')} {row.training}".strip()
    (line,) = axes.plot(result.epochs, result.top1s, linestyle=dashes, marker=".", label=label)
    if row.stable_epoch is not None:
        top1 = result.top1s[result.epochs.index(row.stable_epoch)]
        axes.plot(row.stable_epoch, top1, marker="o", markersize=9, fillstyle="none", color=line.get_color())


RESULTS, PICTURE, CSV, MARKDOWN = "sweep.json", "sweep.svg", "sweep.csv", "sweep.md"
COMPARISON = "workers"


def results_as_json(name: str, results: Sequence[RunResult]) -> dict[str, Any]:
    """A sweep as plain values for JSON: the recipe's name and each training's result."""
    return {"recipe": name, "runs": [asdict(result) for result in results]}


def write_results(folder: Path, name: str, results: Sequence[RunResult]) -> None:
    """sweep.json and .csv for machines, sweep.md and .svg for people; workers.* where worker counts differ."""
    groups = group_by_seed(results)
    write_text(folder / RESULTS, json.dumps(results_as_json(name, results), indent=1))
    write_text(folder / CSV, csv_text(results))
    write_text(folder / MARKDOWN, f"# {name}\n\n{by_group(groups).markdown()}\n![curves]({PICTURE})\n")
    write_text(folder / PICTURE, sweep_chart(name, groups))
    compared = compare(results)
    if compared:
        rows, picture = comparison_rows(compared), f"{COMPARISON}.svg"
        data = {"recipe": name, "rule": RULE, "trainings": [asdict(one) for one in compared]}
        notes = f"{RULE}; {FEWEST}"
        write_text(folder / f"{COMPARISON}.json", json.dumps(data, indent=1))
        write_text(
            folder / f"{COMPARISON}.csv",
            Rows(tuple(Column(each.name, each.name, str) for each in fields(WorkerComparison)), compared).csv(),
        )
        write_text(
            folder / f"{COMPARISON}.md",
            f"# {name}: workers compared\n\n{rows.markdown()}\n{notes}\n\n![curves]({picture})\n",
        )
        write_text(folder / picture, workers_chart(name, results, compared))
