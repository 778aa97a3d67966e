"""Tables that are printed, written as CSV, Markdown and JSON; and pictures as SVG."""

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
    """A heading with its unit, a row's value (its attribute's name, also as in "setup.workers", or a function), and the
    text of a value (how to format it, as in ",.0f", or a function). A value of None has the text `empty`."""

    name: str
    value: str | Callable[[Any], Any]
    text: str | Callable[[Any], str] = ""
    empty: str = ""

    def of(self, row: Any) -> Any:
        """A row's value."""
        return attrgetter(self.value)(row) if isinstance(self.value, str) else self.value(row)

    def text_of(self, value: Any) -> str:
        """A value as text."""
        if value is None:
            return self.empty
        return format(value, self.text) if isinstance(self.text, str) else self.text(value)


@dataclass(frozen=True, slots=True)
class Rows:
    """A table: its columns, and what each of its rows is about."""

    columns: tuple[Column, ...]
    rows: Sequence[Any]

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The headings, then the texts of each row."""
        heads = tuple(column.name for column in self.columns)
        return [heads, *(tuple(column.text_of(column.of(row)) for column in self.columns) for row in self.rows)]

    def filled(self) -> "Rows":
        """The table without columns that are empty in all rows."""
        kept = (column for column in self.columns if any(column.text_of(column.of(row)) for row in self.rows))
        return Rows(tuple(kept), self.rows)

    def without(self, *names: str) -> "Rows":
        """The table without some columns."""
        return Rows(tuple(column for column in self.columns if column.name not in names), self.rows)

    def text(self, *, numbers: bool = True) -> str:
        """For a terminal; with `numbers` all columns but the first are flush right."""
        return align_columns(self.cells, numbers=numbers)

    def markdown(self, rules: Sequence[str] = ()) -> str:
        """As a Markdown table; `rules` align its columns, as "---:" does to the right."""
        return markdown_table(self.cells, rules=rules)

    def csv(self) -> str:
        """As comma-separated texts."""
        return csv_table(self.cells)

    def json(self) -> list[dict[str, Any]]:
        """The values of each row by the columns' names."""
        return [{column.name: column.of(row) for column in self.columns} for row in self.rows]


def columns_of(heads: Sequence[str], text: str | Callable[[Any], str] = "") -> tuple[Column, ...]:
    """Columns of rows that are tuples of values in this order."""
    return tuple(Column(head, itemgetter(i), text) for i, head in enumerate(heads))


def figure(draw: "Callable[[Axes], object]", size: tuple[float, float], **labels: Any) -> str:
    """SVG of what `draw` draws; `labels` are those of the axes."""
    made, axes = subplots(figsize=size)
    draw(axes)
    axes.set(**labels)
    axes.grid(alpha=0.3)
    if axes.get_legend() is None:
        axes.legend(fontsize="small")
    return figure_svg(made)


def subplots(*grid: int, **how: Any) -> Any:
    """A figure of matplotlib and its axes; importing matplotlib takes a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt.subplots(*grid, layout="constrained", **how)


def figure_svg(figure: "Figure") -> str:
    """A figure as an SVG element, for pages; the figure is closed."""
    from matplotlib import pyplot as plt

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    plt.close(figure)
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)
