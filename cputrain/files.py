"""Writing files so that they are either complete or absent, errors that name the file, and the names of a run's files.

Without recipes, so that `cputrain launch` starts in no time.
"""

import errno
import os
from io import RawIOBase
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import errors_name, write_with
from cputrain.affinity.planner.plan_file import PLAN_FILE
from cputrain.affinity.terminal import CODES

RECIPE, PLAN, ENVIRONMENT, CHECKPOINTS, LOGS, METRICS, REPORT = (
    "recipe.yaml",
    PLAN_FILE,
    "environment.json",
    "checkpoints",
    "logs",
    "metrics",
    "report.html",
)


def write_atomic(path: Path, data: bytes) -> None:
    """`write_with` of bytes."""
    write_with(path, lambda file: file.write(data))


def write_text(path: Path, text: str) -> None:
    """`write_atomic` of UTF-8; what a name has that is not UTF-8 is written as codes."""
    write_atomic(path, text.encode(errors=CODES))


def write_whole(file: RawIOBase, data: bytes, path: Path) -> None:
    """Write to a file without a buffer. Raises OSError that names it, also where a part of the data has had room."""
    with errors_name(path):
        if (file.write(data) or 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the next write would fail like this


# What is found in the place of a file whose data was never fetched, by its first bytes in small letters.
STAND_INS = {
    b"version https://git-lfs": "a git-LFS pointer, whose data is still on its server: run git lfs pull in the clone",
    b"<!doctype html": "a web page, as servers send them for a file: download it again",
    b"<html": "a web page, as servers send them for a file: download it again",
}
MOST_START = 64  # bytes


def stand_in(data: bytes) -> str | None:
    """What stands in the place of the file that begins with these bytes, and what to do; None where it is the file."""
    start = data[:MOST_START].lstrip().lower()
    return next((told for first, told in STAND_INS.items() if start.startswith(first)), None)


def check_fetched(path: Path) -> None:
    """Raise InputError where something else stands in the place of a file, or it cannot be read."""
    try:
        with path.open("rb") as file:
            told = stand_in(file.read(MOST_START))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if told:
        raise InputError(f"{path} is {told}")
