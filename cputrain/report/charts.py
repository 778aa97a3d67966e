"""Charts and tables of pages."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

Table = Mapping[str, np.ndarray]
"""Columns of the same length, float64; NaN where there is no value. Those named in AXES never decrease."""

AXES = ("step", "epoch", "time")
MOST_ROWS = 160_000  # of all runs on a page: 50 bytes a row, and a browser draws them at once
FEWEST_ROWS = 400  # of a run, however many there are


def column(values: Iterable[Any]) -> np.ndarray:
    """Numbers as a column; None is NaN."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def table_of(
    events: Sequence[Mapping[str, Any]], names: Sequence[str], times: Sequence[float]
) -> dict[str, np.ndarray]:
    """The fields of events as columns, with their times in seconds since the run's first event."""
    columns = {name: column(event.get(name) for event in events) for name in ("step", "epoch", *names)}
    return {**columns, "time": column(times)}


def rows_per_run(runs: int) -> int:
    """The most rows of one run's table on a page with so many runs."""
    return max(MOST_ROWS // max(runs, 1), FEWEST_ROWS)


def thin(table: Table, most: int) -> Table:
    """At most about `most` rows: of equal stretches of rows those with the lowest and the highest value of each column,
    and the first and the last row."""
    rows = len(next(iter(table.values()), ()))
    values = [each for name, each in table.items() if name not in AXES]
    if rows <= most or not values:
        return table
    stretches = max((most - 2) // (2 * len(values)), 1)
    size = -(-rows // stretches)
    kept = {0, rows - 1}
    for each in values:
        padded = np.full(size * -(-rows // size), np.nan)
        padded[:rows] = each
        parts = padded.reshape(-1, size)
        firsts = np.arange(len(parts)) * size
        known = ~np.isnan(parts).all(axis=1)
        for extreme in (
            np.where(np.isnan(parts), np.inf, parts).argmin(1),
            np.where(np.isnan(parts), -np.inf, parts).argmax(1),
        ):
            kept.update((firsts + extreme)[known].tolist())
    index = np.array(sorted(kept))
    return {name: each[index] for name, each in table.items()}


def packed(values: np.ndarray) -> str:
    """Numbers as the base64 of little-endian float32, a quarter of the bytes of their digits."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


LINE, FAINT, LOW, HIGH, LIMIT = "line", "faint", "low", "high", "limit"
"""Kinds of lines: faint are single steps behind their means, low and high a range, a limit is dashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve: column `y` of a table over one of AXES. `run` is the number of its run on a page of several; what
    varies from step to step `smooths` as the reader asks."""

    label: str
    table: str
    y: str
    kind: str = LINE
    run: int | None = None
    smooths: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines with a common unit. `words` says in text what they show; `axes` are the x axes to choose from."""

    id: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    words: str = ""
    axes: tuple[str, ...] = AXES
    from_zero: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """Values by row and column, one table (rows, columns) for each measure; `at` are the columns, steps or what
    `across` says."""

    id: str
    title: str
    unit: str
    rows: tuple[str, ...]
    at: tuple[int, ...] | tuple[str, ...]
    measures: Mapping[str, np.ndarray]
    words: str
    log: bool = False
    across: str = "step"


def charts_data(
    charts: Sequence[Chart], tables: Mapping[str, Table], heats: Sequence[Heat], most_rows: int
) -> dict[str, object]:
    """The page's data, ready for JSON, with the tables thinned to `most_rows` rows each."""
    thinned = {name: thin(table, most_rows) for name, table in tables.items()}
    return {
        "charts": [asdict(chart) for chart in charts],
        "tables": {name: {key: packed(each) for key, each in table.items()} for name, table in thinned.items()},
        "heats": [
            {
                **{key: getattr(heat, key) for key in ("id", "title", "unit", "rows", "at", "log", "across")},
                "measures": {name: packed(values.ravel()) for name, values in heat.measures.items()},
            }
            for heat in heats
        ],
    }


def words_of(label: str, table: Table, y: str, at: str = "step") -> str:
    """A curve in words: how many values, the first, the last, the lowest and the highest; "" without any."""
    known = ~np.isnan(table[y])
    values, places = table[y][known], table[at][known]
    if not len(values):
        return ""
    if len(values) == 1:
        return f"{label}: {values[0]:.4g} at {at} {places[0]:,.6g}"
    low, high = int(values.argmin()), int(values.argmax())
    return (
        f"{label}: {len(values):,} values, first {values[0]:.4g}, last {values[-1]:.4g}, "
        f"lowest {values[low]:.4g} at {at} {places[low]:,.6g}, highest {values[high]:.4g} at {at} {places[high]:,.6g}"
    )


def drawn(chart: Chart, tables: Mapping[str, Table]) -> Chart | None:
    """The chart with the lines that have values, and their words; None where none has."""
    lines = tuple(line for line in chart.lines if not np.isnan(tables[line.table][line.y]).all())
    if not lines:
        return None
    at = chart.axes[0]
    words = "; ".join(words_of(line.label, tables[line.table], line.y, at) for line in lines[:8])
    more = f"; and {len(lines) - 8} more lines" if len(lines) > 8 else ""
    return replace(chart, lines=lines, words=words + more)
