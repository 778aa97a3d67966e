"""Markdown tables and text."""

import re
from collections.abc import Iterable, Sequence

from cputrain.affinity.terminal import markdown_table

MARKUP = re.compile(r"[*<\[\]]|(?<!\w)_|_(?!\w)")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with each cell on one line."""
    lines = [[" ".join(text.split()) for text in row] for row in (head, *rows)]
    return markdown_table(lines).removesuffix("\n")


def code(text: str) -> str:
    """Return the text as inline code."""
    return f"`{text}`"


def plain(text: str) -> str:
    """Escape text that was not written as Markdown, except code in backticks."""
    parts = text.split("`")
    return "`".join(part if i % 2 else MARKUP.sub(r"\\\g<0>", part) for i, part in enumerate(parts))
