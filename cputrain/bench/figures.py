"""Figures with their spread and their limit, tables, and reports of them as text and JSON."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from cputrain.affinity.terminal import align_columns
from cputrain.affinity.wording import counted

Cell = str | float | None
NOISY = 0.3  # of the median: a range that says that something else runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A speed in `unit`: median, lowest and highest of the repeats; more is better.

    `limit` is what nothing here can exceed, in the same unit and from the same run, and `limited_by` what that is.
    `note` says the same in another way, as the time that it takes.
    """

    name: str
    value: float
    low: float
    high: float
    unit: str
    limit: float | None = None
    limited_by: str = ""
    note: str = ""

    @property
    def spread(self) -> tuple[float, float, float]:
        """Median, lowest and highest."""
        return self.value, self.low, self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with headings; `shown` rows of it are printed, all of them are in the JSON. `drawn` is the number of the
    column that a picture shows as bars, None for none."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    shown: int | None = None
    drawn: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a benchmark: what was measured where and how, figures, tables, remarks."""

    title: str
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


def figure_of(
    name: str, values: Sequence[float], unit: str, *, limit: float | None = None, limited_by: str = "", note: str = ""
) -> Figure:
    """The figure of repeated measurements."""
    value, low, high = spread_of(values)
    return Figure(name=name, value=value, low=low, high=high, unit=unit, limit=limit, limited_by=limited_by, note=note)


def spread_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lowest and highest."""
    return median(values), min(values), max(values)


def interleaved(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each of the runs returns, by name, in turns: a disturbance then meets all of them. One more round before
    that is not counted."""
    for run in runs.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(run())
    return found


def report_text(report: Report) -> str:
    """The report for a terminal."""
    parts = [report.title, *([figures_text(report.figures)] if report.figures else ())]
    parts += [_table_text(table) for table in report.tables]
    notes = [*report.notes, *noise_note(report.figures)]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else ())])


def noise_note(figures: Sequence[Figure]) -> list[str]:
    """A line about figures whose repeats differ much; empty where none do."""
    noisy = sum(figure.high - figure.low > NOISY * figure.value for figure in figures)
    if not noisy:
        return []
    return [
        f"warning: the repeats of {noisy} of {counted(len(figures), 'figure')} differ by more than {100 * NOISY:.0f} "
        "%: measure where nothing else runs"
    ]


def figures_text(figures: Sequence[Figure]) -> str:
    """One line for each figure: median, range, limit and share of it."""
    noted = any(figure.note for figure in figures)
    head = ("", "median", "range", "", *(("",) if noted else ()), "limit", "of it", "limited by")
    rows = [
        (
            figure.name,
            number(figure.value),
            f"{number(figure.low)}-{number(figure.high)}",
            figure.unit,
            *((figure.note,) if noted else ()),
            "" if figure.limit is None else number(figure.limit),
            "" if figure.limit is None else f"{100 * figure.value / figure.limit:.0f} %",
            figure.limited_by,
        )
        for figure in figures
    ]
    return align_columns([head, *rows])


def _table_text(table: Table) -> str:
    rows = [tuple(number(cell) if isinstance(cell, float) else str(cell or "") for cell in row) for row in table.rows]
    kept = rows if table.shown is None else rows[: table.shown]
    rest = len(rows) - len(kept)
    more = f"\n({rest} more: --format json)" if rest else ""
    return f"{table.title}\n{align_columns([table.head, *kept], numbers=True)}{more}"


def number(value: float) -> str:
    """Three digits that count: "0.0123", "1.23", "123", "12,300"."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def report_json(report: Report, *, machine: str, versions: Sequence[str]) -> str:
    """The report with the machine and the versions that it depends on; every row of a table is an object."""
    tables = {table.title: [dict(zip(table.head, row, strict=True)) for row in table.rows] for table in report.tables}
    return json.dumps(
        {
            "title": report.title,
            "machine": machine,
            "versions": list(versions),
            "figures": [asdict(figure) for figure in report.figures],
            "tables": tables,
            "notes": [*report.notes, *noise_note(report.figures)],
        },
        indent=1,
    )
