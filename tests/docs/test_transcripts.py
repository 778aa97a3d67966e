"""The transcripts of README.md and docs/ are what the commands print: every line that is not `...`."""

import io
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import groupby
from pathlib import Path

import pytest

from cputrain.cli import main
from tests.support.markdown import PAGES, Block, blocks, name_of

PROMPT, GAP = "$ ", "..."


def calls(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Each command of a transcript, as the words behind `cputrain`, and the lines shown below it."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(PROMPT)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        program, *words = shlex.split(lines[start].removeprefix(PROMPT), comments=True)
        assert program == "cputrain", "a transcript of another program is tagged `console here`"
        yield words, lines[start + 1 : end]


def output_of(words: list[str]) -> list[str]:
    """What the command prints."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with redirect_stdout(out), redirect_stderr(out):
        main(words)
    out.seek(0)
    return [line.rstrip() for line in out.read().splitlines()]


def missing(shown: list[str], printed: list[str]) -> list[str]:
    """The first lines without a gap that are not printed where the transcript has them; [] where it is right."""
    place, after_gap = 0, False
    parts = [(gap, list(lines)) for gap, lines in groupby(shown, lambda line: line.strip() == GAP)]
    for number, (gap, lines) in enumerate(parts):
        if gap:
            after_gap = True
            continue
        last = len(printed) - len(lines)
        starts = range(place, last + 1) if after_gap else [place]
        if number == len(parts) - 1:
            starts = [start for start in starts if start == last]
        found = next((start for start in starts if printed[start : start + len(lines)] == lines), None)
        if found is None:
            return lines
        place, after_gap = found + len(lines), False
    return []


TRANSCRIPTS = [block for page in PAGES for block in blocks(page) if block.tag == "console"]


@pytest.mark.slow
@pytest.mark.parametrize("block", TRANSCRIPTS, ids=lambda block: f"{name_of(block.page)}:{block.line}")
def test_a_transcript_shows_what_is_printed(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, shown in calls(block.text):
        printed = output_of(words)
        assert not missing(shown, printed), "\n".join(printed)


def test_a_line_that_is_not_printed_is_found() -> None:
    printed = ["a", "b", "c", "d"]
    assert not missing(["a", "...", "d"], printed)
    assert not missing(["...", "b", "c", "..."], printed)
    assert missing(["b"], printed) == ["b"]  # not all that is printed
    assert missing(["a", "...", "c"], printed) == ["c"]  # not the end
    assert missing(["...", "c", "...", "b", "..."], printed) == ["b"]  # another order
    assert missing(["a", "...", "b", "d"], printed) == ["b", "d"]  # a gap that is not shown
    assert missing(["a", "b", "c", "d", "e"], printed) == ["a", "b", "c", "d", "e"]
