"""Results of a sweep as text, CSV, JSON and Markdown."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from cputrain.affinity.terminal import align_columns, csv_table, markdown_table
from cputrain.files import write_text
from cputrain.runs.events import FILE as EVENTS
from cputrain.sweep.results import IMAGES, RunResult, SeedGroup, group_by_seed
from cputrain.sweep.run import clock
from cputrain.sweep.variants import SEED, WORKERS, label_of
from cputrain.sweep.workers import FEWEST, RULE, compare, comparison_rows

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A heading, a result's value (None: an empty cell), and the text of a value.

    `requested`: the value is a setting. A setting that all rows share stands above a terminal's table, not in it.
    """

    head: str
    value: Callable[[RunResult], Any]
    text: Callable[[Any], str] = str
    requested: bool = False


def _setting(name: str) -> Callable[[RunResult], Any]:
    return lambda result: getattr(result.setup, name)


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _points(value: float) -> str:
    return f"{value:.2f}"


def _plain(value: float) -> str:
    return f"{value:g}"


def _significant(value: float) -> str:
    return f"{value:.4g}"


ENDED_BY, FOLDER = "ended by", "result file"
COLUMNS = (
    Column(head="workers", value=_setting("workers"), text=_count, requested=True),
    Column(head="local batch", value=_setting("local_batch"), text=_count, requested=True),
    Column(head="global batch", value=_setting("global_batch"), text=_count, requested=True),
    Column(head="epochs", value=_setting("epochs"), text=_count, requested=True),
    Column(head="weight decay", value=_setting("weight_decay"), text=_plain, requested=True),
    Column(head="optimizer", value=_setting("optimizer"), requested=True),
    Column(head="peak rate", value=_setting("peak_rate"), text=_plain, requested=True),
    Column(head="other settings", value=lambda r: label_of(r.settings, without=SHOWN_KEYS) or None, requested=True),
    Column(head="steps", value=lambda r: r.steps, text=_count),
    Column(head="max accuracy %", value=lambda r: r.best and r.best[0], text=_points),
    Column(head="at step", value=lambda r: r.best and r.best[1], text=_count),
    Column(head="final accuracy %", value=lambda r: r.top1, text=_points),
    Column(head="training loss", value=lambda r: r.train_loss, text=_significant),
    Column(head="validation loss", value=lambda r: r.val_loss, text=_significant),
    Column(head="images/s", value=lambda r: r.images_per_s, text=_count),
    Column(head="time to train s", value=lambda r: r.seconds, text=_significant),
    Column(head="walltime requested", value=lambda r: r.requested_s, text=clock),
    Column(head="walltime used", value=lambda r: r.wall_s, text=clock),
    Column(head="data", value=lambda r: None if r.data == IMAGES else r.data),
    Column(head="status", value=lambda r: r.status),
    Column(head=ENDED_BY, value=lambda r: r.ended_by or None),
    Column(head=FOLDER, value=lambda r: f"{r.run}/{EVENTS}" if r.run else None),
)


def table(groups: Sequence[SeedGroup]) -> str:
    """One line for each group, numbers as mean and range over its seeds, without empty columns.

    Settings that all groups share stand above; the causes of trainings that did not finish stand below.
    """
    shorter = [column for column in COLUMNS if column.head not in (ENDED_BY, FOLDER)]
    cells = {column: [_cell(column, group) for group in groups] for column in shorter}
    filled = {column: texts for column, texts in cells.items() if any(texts)}
    same = [c for c, texts in filled.items() if c.requested and len(groups) > 1 and len(set(texts)) == 1]
    above = f"all with {', '.join(f'{c.head} {filled[c][0]}' for c in same)}\n" if same else ""
    shown = {column.head: texts for column, texts in filled.items() if column not in same}
    ended = dict.fromkeys(
        f"\n{r.label or r.run}: {r.status}: {r.ended_by}" for group in groups for r in group.results if r.ended_by
    )
    rows = [tuple(shown), *zip(*shown.values(), strict=True)]
    return above + align_columns(rows, numbers=True) + "".join(ended)


def markdown(groups: Sequence[SeedGroup]) -> str:
    """The table as Markdown, without empty columns."""
    cells = {column.head: [_cell(column, group) for group in groups] for column in COLUMNS}
    filled = {head: texts for head, texts in cells.items() if any(texts)}
    return markdown_table([tuple(filled), *zip(*filled.values(), strict=True)])


def csv_text(results: Sequence[RunResult]) -> str:
    """One row for each training, with every column; durations as H:MM:SS, other numbers unrounded."""
    heads = [column.head for column in COLUMNS]
    rows = [
        [
            "" if value is None else clock(value) if column.text is clock else value
            for column in COLUMNS
            for value in [column.value(result)]
        ]
        for result in results
    ]
    return csv_table(
        [("seed", *heads), *((dict(r.settings).get(SEED, ""), *row) for r, row in zip(results, rows, strict=True))]
    )


def _cell(column: Column, group: SeedGroup) -> str:
    """A group's cell: the value, or mean and range where seeds differ; texts are counted."""
    values = [value for result in group.results if (value := column.value(result)) is not None]
    if not values:
        return ""
    if len(set(values)) == 1:
        return column.text(values[0])
    if isinstance(values[0], str):
        return ", ".join(f"{count} {text}" if count > 1 else text for text, count in Counter(values).items())
    return f"{column.text(mean(values))} ({column.text(min(values))}-{column.text(max(values))})"


def spread(values: Sequence[float]) -> str:
    """Mean, and the range where there are several values: "98.41 (98.30-98.52)"."""
    if not values:
        return ""
    several = f" ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else ""
    return f"{mean(values):.2f}{several}"


RESULTS, PICTURE, CSV, MARKDOWN = "sweep.json", "sweep.svg", "sweep.csv", "sweep.md"
COMPARISON = "workers"


def results_as_json(name: str, results: Sequence[RunResult]) -> dict[str, Any]:
    """A sweep as plain values for JSON: the recipe's name and each training's result."""
    return {"recipe": name, "runs": [asdict(result) for result in results]}


def write_results(folder: Path, name: str, results: Sequence[RunResult]) -> None:
    """sweep.json and .csv for machines, sweep.md and .svg for people; workers.* where worker counts differ."""
    from cputrain.sweep.charts import sweep_chart, workers_chart  # matplotlib: a second, at the end only

    groups = group_by_seed(results)
    write_text(folder / RESULTS, json.dumps(results_as_json(name, results), indent=1))
    write_text(folder / CSV, csv_text(results))
    write_text(folder / MARKDOWN, f"# {name}\n\n{markdown(groups)}\n![curves]({PICTURE})\n")
    write_text(folder / PICTURE, sweep_chart(name, groups))
    compared = compare(results)
    if compared:
        rows, picture = comparison_rows(compared), f"{COMPARISON}.svg"
        data = {"recipe": name, "rule": RULE, "trainings": [asdict(one) for one in compared]}
        notes = f"{RULE}; {FEWEST}"
        write_text(folder / f"{COMPARISON}.json", json.dumps(data, indent=1))
        write_text(
            folder / f"{COMPARISON}.csv",
            csv_table([list(asdict(compared[0])), *(list(asdict(one).values()) for one in compared)]),
        )
        write_text(
            folder / f"{COMPARISON}.md",
            f"# {name}: workers compared\n\n{markdown_table(rows)}\n{notes}\n\n![curves]({picture})\n",
        )
        write_text(folder / picture, workers_chart(name, results, compared))
