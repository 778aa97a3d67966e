"""Rows of cells as text: aligned columns, Markdown, CSV. The first row holds the headings."""

import csv
import io
from collections.abc import Sequence

from affinity.terminal_text import printable_lines

Rows = Sequence[Sequence[str]]


def align_columns(rows: Rows, *, numbers: bool = False) -> str:
    """Columns as wide as their widest cell, flush left; with `numbers` all but the first flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if numbers and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def markdown_table(rows: Rows, *, rules: Sequence[str] = ()) -> str:
    """A Markdown table; `rules` are the cells under the headings, as "---:" for a column flush right."""
    head, *body = [f"| {' | '.join(map(_markdown_cell, row))} |" for row in rows]
    return "\n".join([head, f"|{'|'.join(rules or ('---',) * len(rows[0]))}|", *body]) + "\n"


def _markdown_cell(text: str) -> str:
    """A cell's text on one line, in which a bar ends no cell and a name begins no HTML."""
    return " ".join(printable_lines(text).replace("|", "\\|").replace("<", "&lt;").split())


def csv_table(rows: Sequence[Sequence[object]]) -> str:
    """Comma-separated values, one row a line."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()
