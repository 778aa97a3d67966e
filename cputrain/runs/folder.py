"""A run folder: its files, lock and removal, what its run has reached, and restarts of its job."""

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from cputrain import __version__
from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import plural
from cputrain.checkpoint.files import BEST, is_checkpoint, list_checkpoints
from cputrain.files import CHECKPOINTS, ENVIRONMENT, LOGS, METRICS, PLAN, RECIPE, REPORT, recipe_names, write_text
from cputrain.manifest import Manifest, ScaleRecord, read_manifest
from cputrain.mpi.usage import FOLDER as USAGE
from cputrain.runs.events import FILE as EVENTS
from cputrain.runs.events import lines_of_events, read_events
from cputrain.variables import is_restarted, job_in

MARK = ".cputrain-run"
# Subfolders of a run that may be links to another place, and the files of a run in them; other files there are kept.
LINKED = {"checkpoints": ("step-*", "best", ".*.partial"), "logs": ("rank-*.log",), "usage": ("*.jsonl",)}
FOLDERS = (*LINKED, METRICS)
LOCK = ".cputrain-lock"
RUN_FILES = (PLAN, ENVIRONMENT, CHECKPOINTS, LOGS, METRICS, REPORT, EVENTS, USAGE, RECIPE)


def mark(folder: Path) -> None:
    """Mark a folder as a run's before anything else is written there."""
    if not is_marked(folder):
        write_text(folder / MARK, f"cputrain {__version__} writes this run; train --overwrite removes it\n")


def is_empty(folder: Path) -> bool:
    """Whether a folder is missing or empty, ignoring the partial file of a start that was killed in `mark`."""
    return not folder.is_dir() or all(path.match(f".{MARK}.*.partial") for path in folder.iterdir())


def is_marked(folder: Path) -> bool:
    """Whether a run was written into this folder."""
    return (folder / MARK).is_file()


def check_removable(folder: Path, names: tuple[str, ...]) -> None:
    """Raise InputError if a part of a run cannot be removed; called before anything is removed."""
    for path in (folder / name for name in names):
        if not path.is_symlink():
            continue
        target = path.resolve()
        if not path.exists():
            raise InputError(
                f"the run cannot be replaced, as {path} is a link to {target}, which does not exist: mount it, or "
                "remove the link"
            )
        if path.is_dir() and path.name not in LINKED:
            raise InputError(f"the run cannot be replaced, as {path} is a link to the folder {target}: remove the link")
        if path.is_dir() and not os.access(target, os.W_OK | os.X_OK):
            raise InputError(
                f"the run cannot be replaced, as {path} is a link to {target}, which is not writable: change its "
                "permissions first"
            )


def remove_run(folder: Path, names: tuple[str, ...]) -> None:
    """Remove the parts of a run; do nothing in a folder without one. In a linked folder remove only a run's files and
    keep the link. The mark stays, so that an interrupted removal can be repeated."""
    if not is_marked(folder):
        return
    check_removable(folder, names)
    for path in (folder / name for name in names):
        if path.is_symlink() and path.is_dir():
            for linked in [match for pattern in LINKED[path.name] for match in path.glob(pattern)]:
                _remove(linked)
        else:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, *, restarted: bool = False, job: str = "") -> Iterator[None]:
    """Lock a run folder against other trainings; create it if necessary. `job` is the name of this training's job.

    Raises InputError if another training has the lock, except that with `restarted` a lock of the same job is ignored:
    whoever restarted the job knows that the earlier attempt has ended, but file servers may keep a crashed host's lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark(folder)
    with (folder / LOCK).open("ab") as file:
        _take(file, folder, restarted=restarted, job=job)
        with suppress(OSError):  # a full disk: the lock is held even so
            (folder / LOCK).write_text(
                json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "job": job}), encoding="utf-8"
            )
        yield


def check_unlocked(folder: Path, *, restarted: bool = False, job: str = "") -> bool:
    """Raise InputError if `locked` would; changes nothing. Return whether it is certain that nothing trains there."""
    if not (folder / LOCK).is_file():
        return True
    with (folder / LOCK).open("ab") as file:
        return _take(file, folder, restarted=restarted, job=job)


def _take(file: IO[bytes], folder: Path, *, restarted: bool, job: str) -> bool:
    """Lock the file; return whether it is locked now, which it is not with a restart or without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _read_object(folder / LOCK)
        if not restarted or holder.get("job", job) != job:
            identified = {"pid", "host"} <= holder.keys()
            who = f"process {holder['pid']} on {holder['host']}" if identified else "another process"
            raise InputError(
                f"output {folder} is in use: {who} is training there; wait for it to finish, set output to another "
                f"folder, or remove {folder / LOCK} if that host has crashed"
            ) from None
        return False
    except OSError:
        return False  # the file system has no locks
    return True


def _read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; {} if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def run_of(spec: str) -> Path | None:
    """Return the run folder that `spec` or its recipe.yaml names; None if `spec` names a recipe."""
    path = Path(spec)
    folder = path.parent if path.name == RECIPE else path
    # Not Path.is_file, which raises if a word is too long for a path.
    begun = os.path.isfile(folder / RECIPE) and (path == folder or os.path.isfile(folder / EVENTS))  # noqa: PTH113
    return folder if spec and begun and spec not in recipe_names() else None


def checkpoints_of(run: Path | None, named: Sequence[Path], *, last: bool) -> tuple[Path, ...]:
    """Return the named checkpoints (those in a named folder oldest first), else the best or last one of a run.

    Raises InputError if there is none.
    """
    if named and last:
        raise InputError("--checkpoint and --last cannot be used together: remove one")
    if named:
        return tuple(path for folder in named for path in _checkpoints_in(folder))
    if run is None:
        raise InputError("eval of a recipe needs --checkpoint PATH: add it, or give a run folder instead")
    saved = list_checkpoints(run / CHECKPOINTS)
    if last and saved:
        return (saved[-1],)
    best = run / CHECKPOINTS / BEST
    if last or not is_checkpoint(best):
        instead = f"--last evaluates {saved[-1].name}" if saved else "the run has saved no checkpoint yet"
        raise InputError(f"{best.parent if last else best} does not exist: {instead}")
    return (best,)


def _checkpoints_in(path: Path) -> list[Path]:
    if is_checkpoint(path):
        return [path]
    checkpoints = [checkpoint for checkpoint in list_checkpoints(path) if is_checkpoint(checkpoint)]
    best = path / BEST
    if is_checkpoint(best) and best.resolve() not in [checkpoint.resolve() for checkpoint in checkpoints]:
        checkpoints.append(best)
    if not checkpoints:
        problem = "is not a checkpoint and contains none" if path.exists() else "does not exist"
        weights = "; to start a training from a file of weights, set model.weights=FILE" if path.is_file() else ""
        raise InputError(
            f"checkpoint {path} {problem}: a run's checkpoints are the folders in its {CHECKPOINTS}/{weights}"
        )
    return checkpoints


def job_of(folder: Path) -> str:
    """Return the name of the job that last trained in a run folder; "" if it had none."""
    return str(_read_object(folder / ENVIRONMENT).get("job", ""))


def has_trained(folder: Path) -> bool:
    """Whether the run in a folder may have trained a step: it has a checkpoint, or other events than of a start."""
    events = (event["event"] if event else "" for event in lines_of_events(folder))
    return any((folder / CHECKPOINTS).glob("*")) or any(event not in ("start", "warning") for event in events)


def starts_over(folder: Path) -> str:
    return f"{folder} starts over, as the run in it had not trained a step"


def has_run(folder: Path) -> bool:
    """Whether a folder contains a run, even one that has not started to train."""
    return is_marked(folder) and (folder / RECIPE).is_file()


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to dotted keys."""
    dotted: dict[str, Any] = {}
    for key, value in values.items():
        dotted |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return dotted


def describe_value(value: Any) -> str:
    """Format a value as in a recipe file."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(describe_value, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def newest_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of the run's newest readable checkpoint."""
    for path in reversed(list_checkpoints(folder / CHECKPOINTS)):
        with suppress(InputError):  # the ranks report damage when they look for the newest intact one
            return read_manifest(path)
    return None


def scale_before(folder: Path) -> ScaleRecord | None:
    """Return the scale of the run's newest checkpoint, else of its last start; None if neither is known."""
    if manifest := newest_manifest(folder):
        return manifest.scale
    starts = [event for event in read_events(folder) if event["event"] == "start"]
    names = ScaleRecord.model_fields.keys()
    if not starts or not names <= starts[-1].keys() or not starts[-1]["workers"]:
        return None
    return ScaleRecord(**{name: starts[-1][name] for name in names})


def finished(folder: Path, last_step: int) -> str | None:
    """Return a message if the run has finished with `last_step` or a later one; else None."""
    ended = [event for event in read_events(folder) if event["event"] == "end" and event["status"] == "done"]
    if not ended or ended[-1]["steps"] < last_step:
        return None
    end = ended[-1]
    figures = [
        f"{name} {end[key]:.2f} %" for name, key in (("top-1", "top1"), ("top-5", "top5")) if end[key] is not None
    ]
    if not figures and end.get("val_loss") is not None:
        figures = [f"validation loss {end['val_loss']:.4f}"]
    result = ", ".join([plural(end["steps"], "step"), *figures])
    return f"{folder} is finished: {result}; nothing to do"


def make_folder(folder: Path, recipe_text: str, *, overwrite: bool, resume: bool = False) -> None:
    """Create the run folder with this recipe.yaml. With `overwrite`, or if an earlier run has not trained a step and is
    not resumed, first remove the files of that run, and no others."""
    is_new = not (folder / RECIPE).is_file()  # or an interrupted removal, which left files of a run
    if overwrite or is_new or not (resume or has_trained(folder)):
        remove_run(folder, RUN_FILES)
    folder.mkdir(parents=True, exist_ok=True)
    mark(folder)
    write_text(folder / RECIPE, recipe_text)


def continues_run(folder: Path, env: Mapping[str, str], *, overwrite: bool) -> bool:
    """Whether this rank's job has failed before and continues the run in a folder. With `overwrite` only a run of its
    own job: an older run is still there if the attempts before ended early."""
    return is_restarted(env) and has_run(folder) and (not overwrite or job_of(folder) == job_in(env))
