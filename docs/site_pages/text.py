"""Markdown: tables and running text."""

import re
from collections.abc import Iterable, Sequence

MARKUP = re.compile(r"[*<\[\]]|(?<!\w)_|_(?!\w)")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell(text) for text in line)} |" for line in lines)


def cell(text: str) -> str:
    """The text on one line, with | escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """The text as inline code."""
    return f"`{text}`"


def plain(text: str) -> str:
    """Text that was not written as Markdown, so that it reads the same on a page; code in backticks stays code."""
    parts = text.split("`")
    return "`".join(part if i % 2 else MARKUP.sub(r"\\\g<0>", part) for i, part in enumerate(parts))
