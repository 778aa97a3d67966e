"""Removing an earlier run from its folder: only where a mark says that it is one, and links are checked first."""

import os
import shutil
from pathlib import Path

from affinity.errors import InputError
from cputrain import __version__
from cputrain.files import write_text

MARK = ".cputrain-run"
# What a folder of a run contains that its name leads to somewhere else; there, other files are left alone.
LINKED = {"checkpoints": ("step-*", "best", ".*.partial"), "logs": ("rank-*.log",), "usage": ("*.jsonl",)}


def mark(folder: Path) -> None:
    """Mark a folder as a run's, before anything else is written there."""
    if not is_marked(folder):
        write_text(folder / MARK, f"cputrain {__version__} writes this run; train --overwrite removes it\n")


def is_empty(folder: Path) -> bool:
    """Whether a folder is not there or has nothing in it, but what a start that was killed in `mark` has left."""
    return not folder.is_dir() or all(path.match(f".{MARK}.*.partial") for path in folder.iterdir())


def is_marked(folder: Path) -> bool:
    """Whether a run has been written into this folder."""
    return (folder / MARK).is_file()


def check_removable(folder: Path, names: tuple[str, ...]) -> None:
    """Raise InputError where a part of a run cannot be removed, before anything is."""
    for path in (folder / name for name in names):
        if not path.is_symlink():
            continue
        target = path.resolve()
        if not path.exists():
            raise InputError(
                f"--overwrite: {path} is a link to {target}, which is not there: mount it, or remove the link"
            )
        if path.is_dir() and path.name not in LINKED:
            raise InputError(f"--overwrite: {path} is a link to the folder {target}: remove the link")
        if path.is_dir() and not os.access(target, os.W_OK | os.X_OK):
            raise InputError(
                f"--overwrite: {path} is a link to {target}, which may not be written to: change that first"
            )


def remove_run(folder: Path, names: tuple[str, ...]) -> None:
    """Remove the parts of a run, and nothing from a folder that has none. Of a folder behind a link only what a run
    writes there, and the link stays; the mark stays too, so that an interrupted removal can be repeated."""
    if not is_marked(folder):
        return
    check_removable(folder, names)
    for path in (folder / name for name in names):
        if path.is_symlink() and path.is_dir():
            for found in [each for pattern in LINKED[path.name] for each in path.glob(pattern)]:
                _remove(found)
        else:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
