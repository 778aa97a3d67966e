"""Markdown: tables and running text."""

import re
from collections.abc import Iterable, Sequence

from cputrain.affinity.terminal import markdown_table

MARKUP = re.compile(r"[*<\[\]]|(?<!\w)_|_(?!\w)")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, each cell on one line."""
    lines = [[" ".join(text.split()) for text in row] for row in (head, *rows)]
    return markdown_table(lines).removesuffix("\n")


def code(text: str) -> str:
    """The text as inline code."""
    return f"`{text}`"


def plain(text: str) -> str:
    """Text that was not written as Markdown, so that it reads the same on a page; code in backticks stays code."""
    parts = text.split("`")
    return "`".join(part if i % 2 else MARKUP.sub(r"\\\g<0>", part) for i, part in enumerate(parts))
