"""The folder of checkpoints: their names, which of them are complete, and how one replaces another or is removed."""

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import plural
from cputrain.checkpoint.files import DamagedError

T = TypeVar("T")
BEST = "best"
REPLACED = ".replaced"
NUMBERED = re.compile(r"step-\d{7,}")


def name_of(step: int) -> str:
    """Return the name of the checkpoint after a step."""
    return f"step-{step:07d}"


def partial_name(step: int) -> str:
    """Return the name of a checkpoint that is being written."""
    return f".{name_of(step)}.partial"


def step_of(checkpoint: Path) -> int:
    """Return the step after which a numbered checkpoint was saved."""
    return int(checkpoint.name.removeprefix(".").removesuffix(REPLACED).removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """List the numbered checkpoints, oldest first, including damaged ones and those being replaced during a crash."""
    found = [path for path in folder.glob("step-*") if NUMBERED.fullmatch(path.name) and path.is_dir()]
    replaced = ((path, _name_of_replaced(path)) for path in folder.glob(f".step-*{REPLACED}"))
    lost = [path for path, before in replaced if NUMBERED.fullmatch(before.name) and not before.exists()]
    return sorted((*found, *lost), key=step_of)


def load_newest(
    folder: Path, load: Callable[[Path], T], gather: Callable[[object], list[Any]], remedy: str
) -> tuple[T, dict[str, str]] | None:
    """Load the newest checkpoint that every rank can load; return it with the problems of newer, damaged ones by name.

    Returns None if there are none. `load` raises DamagedError for a damaged one; `gather` returns every rank's value.
    All ranks must call this. Raises InputError on every rank if all are damaged, or if `load` raises it; `remedy` is
    what to do then.
    """
    names = gather([path.name for path in list_checkpoints(folder)])[0]
    damaged: dict[str, str] = {}
    for name in reversed(names):
        damage, refusal, loaded = "", "", None
        try:
            loaded = load(folder / name)
        except DamagedError as error:
            damage = str(error)
        except InputError as error:
            refusal = str(error)
        problems = gather((damage, refusal))
        if refusals := [each for _, each in problems if each]:
            raise InputError(refusals[0])
        damages = [each for each, _ in problems if each]
        if loaded is not None and not damages:
            return loaded, damaged
        damaged[name] = damages[0]
    if damaged:
        count, newest = plural(len(damaged), "checkpoint"), next(iter(damaged.values()))
        raise InputError(
            f"none of the {count} in {folder} can be used, the newest because {newest}: restore one from a copy, or "
            f"{remedy}"
        )
    return None


def publish_checkpoint(partial: Path, path: Path) -> None:
    """Give a written checkpoint its name, replacing one of that name. If a crash interrupts this, `list_checkpoints`
    still finds the old one, and `restore_replaced` restores its name."""
    _sync(partial)
    replaced = path.with_name(f".{path.name}{REPLACED}")
    if path.exists() or path.is_symlink():
        _delete(replaced)
        path.rename(replaced)
    partial.rename(path)
    _sync(path.parent)
    _delete(replaced)


def restore_replaced(folder: Path) -> None:
    """Restore the name of a checkpoint that was being replaced during a crash; delete one that has been replaced."""
    for replaced in folder.glob(f".*{REPLACED}"):
        path = _name_of_replaced(replaced)
        if path.exists():
            _delete(replaced)
        else:
            replaced.rename(path)


def _name_of_replaced(path: Path) -> Path:
    return path.with_name(path.name.removeprefix(".").removesuffix(REPLACED))


def _delete(path: Path) -> None:
    """Delete a checkpoint that has been renamed; if it is a symbolic link, delete only the link.

    Files that the file system refuses to delete are left for the next start: a file on NFS that another process still
    reads must not end a training.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a checkpoint; rename it first, so that a partly deleted one is never found."""
    gone = path.with_name(f".{path.name}.removed.partial")
    _delete(gone)
    path.rename(gone)
    _delete(gone)


def quarantine(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is no longer found; return its new path."""
    aside = path.with_name(f"{path.name}.damaged")
    _delete(aside)
    return path.rename(aside)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all numbered checkpoints except the newest `keep` and the best one."""
    best = (folder / BEST).resolve()
    for old in list_checkpoints(folder)[:-keep]:
        if old.resolve() != best:
            remove(old)


def remove_partial(folder: Path) -> None:
    """Remove unfinished checkpoints of an earlier start."""
    restore_replaced(folder)
    for partial in folder.glob(".*.partial"):
        _delete(partial)


def set_best(path: Path) -> None:
    """Link BEST to a checkpoint in the same folder; copy it if the file system has no links."""
    best, partial = path.with_name(BEST), path.with_name(f".{BEST}.partial")
    with suppress(FileNotFoundError):
        partial.unlink()
    try:
        partial.symlink_to(path.name)
    except OSError:
        shutil.copytree(path, partial)
    if best.is_dir() and not best.is_symlink():
        publish_checkpoint(partial, best)
    else:
        partial.replace(best)


def _sync(folder: Path) -> None:
    """Flush the names in a folder to disk, so that they survive a crash of the host."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError:  # some network file systems cannot sync folders
        pass
    finally:
        os.close(opened)
