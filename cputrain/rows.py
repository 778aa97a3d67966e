"""Tables as text, CSV, Markdown and JSON."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from cputrain.affinity.terminal import align_columns, csv_table, markdown_table


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
