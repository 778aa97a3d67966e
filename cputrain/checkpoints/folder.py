"""Where checkpoints lie: a folder for each, named by its step, and a link to the best one."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

BEST = "best"
REPLACED = ".replaced"
NUMBERED = re.compile(r"step-\d{7,}")


def name_of(step: int) -> str:
    """The name of the checkpoint after a step."""
    return f"step-{step:07d}"


def partial_name(step: int) -> str:
    """The name of a checkpoint that is being written."""
    return f".{name_of(step)}.partial"


def step_of(checkpoint: Path) -> int:
    """The step after which a numbered checkpoint was saved."""
    return int(checkpoint.name.removeprefix(".").removesuffix(REPLACED).removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """The numbered checkpoints, oldest first, damaged ones included, and those that were being replaced at a crash."""
    found = [path for path in folder.glob("step-*") if NUMBERED.fullmatch(path.name) and path.is_dir()]
    lost = [path for path in folder.glob(f".step-*{REPLACED}") if not _name_of_replaced(path).exists()]
    return sorted((*found, *lost), key=step_of)


def put_in_place(partial: Path, path: Path) -> None:
    """Give a checkpoint that is written its name. One of that name is replaced: where a crash leaves neither,
    `list_checkpoints` finds it, and `restore_replaced` gives it its name again."""
    _sync(partial)
    replaced = path.with_name(f".{path.name}{REPLACED}")
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    partial.rename(path)
    _sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def restore_replaced(folder: Path) -> None:
    """Give a checkpoint its name again that was being replaced when the host crashed; remove one that was replaced."""
    for replaced in folder.glob(f".*{REPLACED}"):
        path = _name_of_replaced(replaced)
        if path.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(path)


def _name_of_replaced(path: Path) -> Path:
    return path.with_name(path.name.removeprefix(".").removesuffix(REPLACED))


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
    restore_replaced(folder)
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
        put_in_place(partial, best)
    else:
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
