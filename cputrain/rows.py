"""Tables as text, CSV, Markdown and JSON, and figures as SVG."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from cputrain.affinity.terminal import align_columns, csv_table, markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Column:
    """A table column: heading with unit, how to get a row's value (attribute path such as "setup.workers", or a
    function), and how to format it (format such as ",.0f", or a function). None is formatted as `empty`."""

    name: str
    value: str | Callable[[Any], Any]
    text: str | Callable[[Any], str] = ""
    empty: str = ""

    def of(self, row: Any) -> Any:
        """Return a row's value."""
        return attrgetter(self.value)(row) if isinstance(self.value, str) else self.value(row)

    def text_of(self, value: Any) -> str:
        """Format a value."""
        if value is None:
            return self.empty
        return format(value, self.text) if isinstance(self.text, str) else self.text(value)


@dataclass(frozen=True, slots=True)
class Rows:
    """A table: its columns, and one object per row."""

    columns: tuple[Column, ...]
    rows: Sequence[Any]

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The headings, then the formatted cells of each row."""
        heads = tuple(column.name for column in self.columns)
        return [heads, *(tuple(column.text_of(column.of(row)) for column in self.columns) for row in self.rows)]

    def filled(self) -> "Rows":
        """Return the table without columns that are empty in all rows."""
        kept = (column for column in self.columns if any(column.text_of(column.of(row)) for row in self.rows))
        return Rows(tuple(kept), self.rows)

    def without(self, *names: str) -> "Rows":
        """Return the table without the named columns."""
        return Rows(tuple(column for column in self.columns if column.name not in names), self.rows)

    def text(self, *, numbers: bool = True) -> str:
        """Format for a terminal; with `numbers` all columns but the first are right-aligned."""
        return align_columns(self.cells, numbers=numbers)

    def markdown(self, rules: Sequence[str] = ()) -> str:
        """Format as a Markdown table; `rules` set the alignment of its columns, such as "---:" for right."""
        return markdown_table(self.cells, rules=rules)

    def csv(self) -> str:
        """Format as comma-separated values."""
        return csv_table(self.cells)

    def json(self) -> list[dict[str, Any]]:
        """Return each row's values by column name."""
        return [{column.name: column.of(row) for column in self.columns} for row in self.rows]


def columns_of(heads: Sequence[str], text: str | Callable[[Any], str] = "") -> tuple[Column, ...]:
    """Return columns for rows that are tuples of values in this order."""
    return tuple(Column(head, itemgetter(i), text) for i, head in enumerate(heads))


def figure(draw: "Callable[[Axes], object]", size: tuple[float, float], **labels: Any) -> str:
    """Return a figure that `draw` draws as SVG; `labels` are axis settings."""
    made, axes = subplots(figsize=size)
    draw(axes)
    axes.set(**labels)
    axes.grid(alpha=0.3)
    if axes.get_legend() is None:
        axes.legend(fontsize="small")
    return figure_svg(made)


def subplots(*grid: int, figsize: tuple[float, float], **how: Any) -> Any:
    """Create a matplotlib figure and its axes; importing matplotlib takes a second."""
    from matplotlib.figure import Figure

    made = Figure(figsize=figsize, layout="constrained")
    return made, made.subplots(*grid, **how)


def figure_svg(figure: "Figure") -> str:
    """Return a figure as an SVG element for HTML pages."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)
