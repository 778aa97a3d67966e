"""Benchmark figures with range and limit, tables, and reports of both as text, JSON and SVG."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from cputrain.affinity.wording import plural
from cputrain.measurements import spread_of
from cputrain.rows import Column, Rows
from cputrain.studies.svg import figure_svg, subplots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cell = str | float | None
K = TypeVar("K")
NOISY = 0.3  # (highest - lowest) / median, above which other processes probably disturbed the repeats
BAR_INCHES, MARGIN_INCHES = 0.28, 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A speed in `unit`, higher is better: median, lowest and highest of the repeats.

    `limit` is an upper bound that was measured in the same run and unit, and `limited_by` its name. `note` gives the
    result in another unit, such as the time of a step.
    """

    name: str
    value: float
    low: float
    high: float
    unit: str
    limit: float | None = None
    limited_by: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with headings. The first `shown` rows are printed (None: all), without the last `hidden` columns; the
    JSON has all. The SVG shows the column with index `drawn` as bars (None: no chart), those of rows with a value in
    column `marked` in another color, and column `limit` as lines across them."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    shown: int | None = None
    hidden: int = 0
    drawn: int | None = None
    limit: int | None = None
    marked: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a benchmark: title (what was measured, where and how), figures, tables and notes."""

    title: str
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


def figure_of(name: str, values: Sequence[float], unit: str, **about: Any) -> Figure:
    """Build the figure of repeated measurements; `about` sets its limit and note."""
    value, low, high = spread_of(values)
    return Figure(name=name, value=value, low=low, high=high, unit=unit, **about)


def seconds_of(act: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long a call takes, in seconds of `clock`."""
    started = clock()
    act()
    return clock() - started


def interleaved(runs: Mapping[K, Callable[[], float]], rounds: int) -> dict[K, list[float]]:
    """Call the functions in turn, `rounds` times, so that a disturbance affects all of them; return their values by
    name. One warm-up round is discarded."""
    for run in runs.values():
        run()
    times: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run())
    return times


def report_text(report: Report) -> str:
    """Format the report for a terminal."""
    figures = figures_text(report.figures) if report.figures else ""
    notes = "\n".join((*report.notes, *noise_note(report.figures)))
    return "\n\n".join(filter(None, (report.title, figures, *map(_table_text, report.tables), notes)))


def noise_note(figures: Sequence[Figure]) -> list[str]:
    """Return a warning about figures whose repeats differ much; empty if there are none."""
    noisy = sum(figure.high - figure.low > NOISY * figure.value for figure in figures)
    line = (
        f"warning: the repeats of {noisy} of {plural(len(figures), 'figure')} differ by more than {100 * NOISY:.0f} "
        "%; measure on an idle machine"
    )
    return [line] if noisy else []


def figures_text(figures: Sequence[Figure]) -> str:
    """Format one line per figure: median, range, limit and percentage of the limit."""
    columns = (
        Column("", "name"),
        Column("median", "value", number_text),
        Column("range", lambda figure: f"{number_text(figure.low)}-{number_text(figure.high)}"),
        Column("", "unit"),
        *((Column("", "note"),) if any(figure.note for figure in figures) else ()),
        Column("limit", "limit", number_text),
        Column("of limit", lambda f: None if f.limit is None else 100 * f.value / f.limit, "{:.0f} %".format),
        Column("limited by", "limited_by"),
    )
    return Rows(columns, figures).text(numbers=False)


def _table_text(table: Table) -> str:
    shown = table.rows if table.shown is None else table.rows[: table.shown]
    hidden = len(table.rows) - len(shown)
    more = f"\n({hidden} more: --format json)" if hidden else ""
    columns = _columns(table.head, _cell)[: len(table.head) - table.hidden]
    return f"{table.title}\n{Rows(columns, shown).filled().text()}{more}"


def _columns(heads: Sequence[str], text: str | Callable[[Any], str] = "") -> tuple[Column, ...]:
    """Return columns for rows that are tuples of values in this order."""
    return tuple(Column(head, itemgetter(i), text) for i, head in enumerate(heads))


def _cell(value: str | float) -> str:
    return number_text(value) if isinstance(value, float) else str(value or "")


def number_text(value: float) -> str:
    """Format with three significant digits: "0.0123", "1.23", "123", "12,300"."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def report_json(report: Report, *, machine: str, versions: Sequence[str]) -> str:
    """Return the report as JSON, with machine and versions; each row of a table is an object."""
    values = {
        "title": report.title,
        "machine": machine,
        "versions": list(versions),
        "figures": list(map(asdict, report.figures)),
        "tables": {table.title: Rows(_columns(table.head), table.rows).json() for table in report.tables},
        "notes": [*report.notes, *noise_note(report.figures)],
    }
    return json.dumps(values, indent=1)


def report_svg(report: Report) -> str:
    """Draw a bar per figure, with its range and a line at its limit; one panel per unit, and one per table that has a
    column to draw."""
    units = dict.fromkeys(figure.unit for figure in report.figures)
    panels = [[figure for figure in report.figures if figure.unit == unit] for unit in units]
    tables = [table for table in report.tables if table.drawn is not None]
    counts = [*map(len, panels), *(len(table.rows[: table.shown]) for table in tables)]
    heights = [BAR_INCHES * count + MARGIN_INCHES for count in counts]
    figure, axes = subplots(len(counts), 1, figsize=(9, sum(heights)), height_ratios=heights, squeeze=False)
    for panel_axes, panel in zip(axes[:, 0], panels, strict=False):
        _draw(panel_axes, panel)
    for panel_axes, table in zip(axes[len(panels) :, 0], tables, strict=True):
        _draw_table(panel_axes, table)
    figure.suptitle(report.title, fontsize="medium")
    return figure_svg(figure)


def _draw(axes: "Axes", figures: Sequence[Figure]) -> None:
    rows = range(len(figures))
    values = [figure.value for figure in figures]
    errors = [[figure.value - figure.low for figure in figures], [figure.high - figure.value for figure in figures]]
    axes.barh(rows, values, xerr=errors, color="C0", height=0.7, label="median and range", error_kw={"linewidth": 1})
    _draw_limits(axes, [figure.limit for figure in figures])
    _label_bars(axes, [figure.name for figure in figures], xlabel=figures[0].unit)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_limits(axes: "Axes", limits: Sequence[Cell]) -> None:
    """Draw a line across each bar that has a limit."""
    lines = [(float(limit), at - 0.4, at + 0.4) for at, limit in enumerate(limits) if limit is not None]
    if lines:
        axes.vlines(*zip(*lines, strict=True), color="C3", linewidth=2, label="limit")


def _draw_table(axes: "Axes", table: Table) -> None:
    """Draw a bar for each printed row of a table."""
    rows, column = table.rows[: table.shown], table.drawn or 0
    values = [float(row[column] or 0.0) for row in rows]
    is_marked = [table.marked is not None and bool(row[table.marked]) for row in rows]
    for color, mark, label in (("C2", False, table.head[column]), ("C0", True, table.head[table.marked or 0])):
        places = [at for at, marked in enumerate(is_marked) if marked is mark]
        axes.barh(places, [values[at] for at in places], color=color, height=0.7, label=label)
    if table.limit is not None:
        _draw_limits(axes, [row[table.limit] for row in rows])
    _label_bars(axes, [str(row[0]) for row in rows], xlabel=table.head[column], title=table.title)
    if table.marked is not None:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _label_bars(axes: "Axes", names: Sequence[str], **labels: str) -> None:
    """Label the bars, the first one at the top."""
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.invert_yaxis()
    axes.set(xlim=(0, None), **labels)
    axes.grid(alpha=0.3, axis="x")
