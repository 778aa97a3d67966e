"""README.md and the pages of docs/: their code blocks, commands, links and inline code."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if not {"_build", "reference"} & set(path.parts)
)
BLOCK = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
COMMENT = re.compile(r"(^|\s+)#\s.*$", re.MULTILINE)
OPERATORS = ";&|<>\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block; `tag` is the text after the fence."""

    page: Path
    line: int
    tag: str
    text: str


def name_of(page: Path) -> str:
    """Read a page by its path in the checkout."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """Return all fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page=page, line=text.count("\n", 0, found.start()) + 1, tag=found[1], text=found[2])
        for found in BLOCK.finditer(text)
    ]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def scripts(page: Path) -> Iterator[str]:
    """Return the shell text of all blocks: ```sh blocks, and the commands after the $ of transcripts."""
    for block in blocks(page):
        if block.tag.split()[:1] == ["sh"]:
            yield block.text
        elif block.tag.split()[:1] == ["console"]:
            yield "\n".join(line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ "))


def inline(page: Path) -> list[str]:
    """Return the inline code of a page, each on one line."""
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose(page))]


def commands(script: str) -> Iterator[list[str]]:
    """Return every call of cputrain in a script as the words after `cputrain`, also after mpirun or another `--`."""
    lexer = shlex.shlex(COMMENT.sub("", script.replace("\\\n", " ")), posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace_split, lexer.whitespace, lexer.commenters = True, " \t", ""
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(OPERATORS):
            yield from _calls(words)
            words = []
        else:
            words.append(word)


def _calls(words: list[str]) -> Iterator[list[str]]:
    for i, word in enumerate(words):
        if word == "cputrain" and (words[:i][-1:] in ([], ["--"]) or "cputrain" not in words[:i]):
            yield words[i + 1 :]
