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
    replaced = ((path, _name_of_replaced(path)) for path in folder.glob(f".step-*{REPLACED}"))
    lost = [path for path, before in replaced if NUMBERED.fullmatch(before.name) and not before.exists()]
    return sorted((*found, *lost), key=step_of)


def put_in_place(partial: Path, path: Path) -> None:
    """Give a checkpoint that is written its name. One of that name is replaced: where a crash leaves neither,
    `list_checkpoints` finds it, and `restore_replaced` gives it its name again."""
    _sync(partial)
    replaced = path.with_name(f".{path.name}{REPLACED}")
    if path.exists() or path.is_symlink():
        _delete(replaced)
        path.rename(replaced)
    partial.rename(path)
    _sync(path.parent)
    _delete(replaced)


def restore_replaced(folder: Path) -> None:
    """Give a checkpoint its name again that was being replaced when the host crashed; remove one that was replaced."""
    for replaced in folder.glob(f".*{REPLACED}"):
        path = _name_of_replaced(replaced)
        if path.exists():
            _delete(replaced)
        else:
            replaced.rename(path)


def _name_of_replaced(path: Path) -> Path:
    return path.with_name(path.name.removeprefix(".").removesuffix(REPLACED))


def _delete(path: Path) -> None:
    """Delete a checkpoint that has lost its name; of a link to one elsewhere only the link.

    What the file system refuses stays, and the next start tries again: a file on NFS that another process still reads
    is no reason to end a training.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a checkpoint: first its name, so that no half of it is ever found."""
    gone = path.with_name(f".{path.name}.removed.partial")
    _delete(gone)
    path.rename(gone)
    _delete(gone)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it counts no more; its new path."""
    aside = path.with_name(f"{path.name}.damaged")
    _delete(aside)
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
        _delete(partial)


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
