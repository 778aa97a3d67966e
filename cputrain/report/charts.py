"""What the page's program draws: charts of lines over tables, heat maps, and their descriptions in words."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from cputrain.report.tables import AXES, Table, packed, thin

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
