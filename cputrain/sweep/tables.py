"""A sweep's results as a table: for terminals, as Markdown, as CSV."""

import csv
import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from cputrain.runs.events import FILE as EVENTS
from cputrain.sweep.clock import clock
from cputrain.sweep.results import IMAGES, Group, Result
from cputrain.sweep.variants import SEED, WORKERS, label_of

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
    """A head, what a result has there (None: nothing), and how a number is written.

    `asked`: it is of the setup, said once for all rows of a terminal's table where all have the same.
    """

    head: str
    value: Callable[[Result], Any]
    form: Callable[[Any], str] = str
    asked: bool = False


def _asked(name: str) -> Callable[[Result], Any]:
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
    Column(head="workers", value=_asked("workers"), form=_count, asked=True),
    Column(head="local batch", value=_asked("local_batch"), form=_count, asked=True),
    Column(head="global batch", value=_asked("global_batch"), form=_count, asked=True),
    Column(head="epochs", value=_asked("epochs"), form=_count, asked=True),
    Column(head="weight decay", value=_asked("weight_decay"), form=_plain, asked=True),
    Column(head="optimizer", value=_asked("optimizer"), asked=True),
    Column(head="peak rate", value=_asked("peak_rate"), form=_plain, asked=True),
    Column(head="other settings", value=lambda r: label_of(r.settings, without=SHOWN_KEYS) or None, asked=True),
    Column(head="steps", value=lambda r: r.steps, form=_count),
    Column(head="max accuracy %", value=lambda r: r.best and r.best[0], form=_points),
    Column(head="at step", value=lambda r: r.best and r.best[1], form=_count),
    Column(head="final accuracy %", value=lambda r: r.top1, form=_points),
    Column(head="training loss", value=lambda r: r.train_loss, form=_significant),
    Column(head="validation loss", value=lambda r: r.val_loss, form=_significant),
    Column(head="images/s", value=lambda r: r.images_per_s, form=_count),
    Column(head="time to train s", value=lambda r: r.seconds, form=_significant),
    Column(head="walltime requested", value=lambda r: r.requested_s, form=clock),
    Column(head="walltime used", value=lambda r: r.wall_s, form=clock),
    Column(head="data", value=lambda r: None if r.data == IMAGES else r.data),
    Column(head="status", value=lambda r: r.status),
    Column(head=ENDED_BY, value=lambda r: r.ended_by or None),
    Column(head=FOLDER, value=lambda r: f"{r.run}/{EVENTS}" if r.run else None),
)


def table(groups: Sequence[Group]) -> str:
    """One line a group: numbers as mean and range over its seeds. Empty columns are left out; what all were asked for
    stands above, what ended some before their time below."""
    shorter = [column for column in COLUMNS if column.head not in (ENDED_BY, FOLDER)]
    cells = {column: [_cell(column, group) for group in groups] for column in shorter}
    filled = {column: texts for column, texts in cells.items() if any(texts)}
    same = [c for c, texts in filled.items() if c.asked and len(groups) > 1 and len(set(texts)) == 1]
    above = f"all with {', '.join(f'{c.head} {filled[c][0]}' for c in same)}\n" if same else ""
    shown = {column.head: texts for column, texts in filled.items() if column not in same}
    ended = dict.fromkeys(
        f"\n{r.label or r.run}: {r.status}: {r.ended_by}" for group in groups for r in group.results if r.ended_by
    )
    return above + columns([tuple(shown), *zip(*shown.values(), strict=True)]) + "".join(ended)


def markdown(groups: Sequence[Group]) -> str:
    """The table with every column that has something in it."""
    cells = {column.head: [_cell(column, group) for group in groups] for column in COLUMNS}
    filled = {head: texts for head, texts in cells.items() if any(texts)}
    return markdown_rows([tuple(filled), *zip(*filled.values(), strict=True)])


def markdown_rows(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a Markdown table, the first row their heads."""
    head, *body = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body]) + "\n"


def csv_text(results: Sequence[Result]) -> str:
    """One row a training, every column; durations as H:MM:SS, other numbers as they are."""
    heads = [column.head for column in COLUMNS]
    rows = [
        [
            "" if value is None else clock(value) if column.form is clock else value
            for column in COLUMNS
            for value in [column.value(result)]
        ]
        for result in results
    ]
    return csv_rows(
        [("seed", *heads), *((dict(r.settings).get(SEED, ""), *row) for r, row in zip(results, rows, strict=True))]
    )


def csv_rows(rows: Sequence[Sequence[object]]) -> str:
    """Rows as CSV, the first row their heads."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def _cell(column: Column, group: Group) -> str:
    """What a group has in a column: its value, or where seeds differ mean and range, or how many have which text."""
    values = [value for result in group.results if (value := column.value(result)) is not None]
    if not values:
        return ""
    if len(set(values)) == 1:
        return column.form(values[0])
    if isinstance(values[0], str):
        return ", ".join(f"{count} {text}" if count > 1 else text for text, count in Counter(values).items())
    return f"{column.form(mean(values))} ({column.form(min(values))}-{column.form(max(values))})"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned text, the first row their heads."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """The first cell to the left, the others to the right."""
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()


def spread(values: Sequence[float]) -> str:
    """Mean, and the range where there are several values: "98.41 (98.30-98.52)"."""
    if not values:
        return ""
    several = f" ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else ""
    return f"{mean(values):.2f}{several}"
