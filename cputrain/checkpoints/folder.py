"""Where checkpoints lie: a folder for each, named by its step, and a link to the best one."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

BEST = "best"
NUMBERED = re.compile(r"step-\d{7,}")


def name_of(step: int) -> str:
    """The name of the checkpoint after a step."""
    return f"step-{step:07d}"


def partial_name(step: int) -> str:
    """The name of a checkpoint that is being written."""
    return f".{name_of(step)}.partial"


def step_of(checkpoint: Path) -> int:
    """The step after which a numbered checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """The numbered checkpoints, oldest first, damaged ones included."""
    found = (path for path in folder.glob("step-*") if NUMBERED.fullmatch(path.name) and path.is_dir())
    return sorted(found, key=step_of)


def put_in_place(partial: Path, path: Path) -> None:
    """Give a checkpoint that is written its name; one of that name is replaced."""
    if path.exists():
        remove(path)
    partial.rename(path)
    _sync(path.parent)


def remove(path: Path) -> None:
    """Remove a checkpoint: first its name, so that no half of it is ever found."""
    gone = path.with_name(f".{path.name}.removed.partial")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it counts no more; its new path."""
    aside = path.with_name(f"{path.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all numbered checkpoints but the newest `keep` and the best one."""
    best = (folder / BEST).resolve()
    for old in list_checkpoints(folder)[:-keep]:
        if old.resolve() != best:
            remove(old)


def remove_partial(folder: Path) -> None:
    """Remove what an earlier start has left unfinished."""
    for partial in folder.glob(".*.partial"):
        if partial.is_dir() and not partial.is_symlink():
            shutil.rmtree(partial)
        else:
            partial.unlink()


def set_best(path: Path) -> None:
    """Make BEST, beside a checkpoint, a link to it; a copy where the file system has no links."""
    best, partial = path.with_name(BEST), path.with_name(f".{BEST}.partial")
    with suppress(FileNotFoundError):
        partial.unlink()
    try:
        partial.symlink_to(path.name)
    except OSError:
        shutil.copytree(path, partial)
    if best.is_dir() and not best.is_symlink():
        remove(best)
    partial.replace(best)


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a crash of the host."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError:  # some network file systems refuse it for folders
        pass
    finally:
        os.close(opened)
