"""Atomic file writes, errors that name the file, the file names of a run, and the names of shipped recipes.

Imports no recipe code, so that `cputrain launch` starts fast.
"""

import errno
import os
from io import RawIOBase
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import PLAN_FILE, errors_name, shipped_folder, write_bytes
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

# Contents that replace a file whose data was never downloaded, by their first bytes in lower case.
PLACEHOLDERS = {
    b"version https://git-lfs": "a git-LFS pointer, not the data: run git lfs pull in the clone",
    b"<!doctype html": "a web page, sent by the server instead of the file: download it again",
    b"<html": "a web page, sent by the server instead of the file: download it again",
}
MAX_START_BYTES = 64  # bytes
RECIPES = shipped_folder("recipes")


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8 with `write_bytes`; parts of names that are not UTF-8 are escaped."""
    write_bytes(path, text.encode(errors=CODES))


def write_whole(file: RawIOBase, data: bytes, path: Path) -> None:
    """Write all data to an unbuffered file. Raises OSError naming the file, also if only a part was written."""
    with errors_name(path):
        if (file.write(data) or 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the error of the next write


def placeholder_text(data: bytes) -> str | None:
    """Return what replaces the file that begins with these bytes, and what to do; None if it is a real file."""
    start = data[:MAX_START_BYTES].lstrip().lower()
    return next((message for first, message in PLACEHOLDERS.items() if start.startswith(first)), None)


def check_downloaded(path: Path) -> None:
    """Raise InputError if a file was never downloaded, or cannot be read."""
    try:
        with path.open("rb") as file:
            message = placeholder_text(file.read(MAX_START_BYTES))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if message:
        raise InputError(f"{path} is {message}")


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))
