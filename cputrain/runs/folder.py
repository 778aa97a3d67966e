"""A run folder: its files, lock and removal, which settings may change on resume, and restarts of its job."""

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
from cputrain.affinity.errors import InputError, Wording, as_argument, as_option
from cputrain.affinity.filesystem import check_writable
from cputrain.affinity.wording import plural
from cputrain.checkpoint.files import MANIFEST, is_checkpoint
from cputrain.checkpoint.folder import BEST, list_checkpoints, step_of
from cputrain.files import CHECKPOINTS, ENVIRONMENT, LOGS, METRICS, PLAN, RECIPE, REPORT, write_text
from cputrain.manifest import Manifest, ScaleRecord, read_manifest
from cputrain.mpi.usage import FOLDER as USAGE
from cputrain.recipe.keys import shortened
from cputrain.recipe.loading import (
    dump_recipe,
    load_recipe,
    nearest_recipes,
    recipe_names,
    recipe_of,
    with_absolute_paths,
)
from cputrain.recipe.schema import USER_SAMPLES, BatchSection, Recipe
from cputrain.runs.events import FILE as EVENTS
from cputrain.runs.events import lines_of_events, read_events
from cputrain.variables import is_restarted, job_in

MARK = ".cputrain-run"
# Subfolders of a run that may be links to another place, and the files of a run in them; other files there are kept.
LINKED = {"checkpoints": ("step-*", "best", ".*.partial"), "logs": ("rank-*.log",), "usage": ("*.jsonl",)}
FOLDERS = (*LINKED, METRICS)


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
            for found in [each for pattern in LINKED[path.name] for each in path.glob(pattern)]:
                _remove(found)
        else:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


LOCK = ".cputrain-lock"


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
            known = {"pid", "host"} <= holder.keys()
            who = f"process {holder['pid']} on {holder['host']}" if known else "another process"
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
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# Keys and sections that affect where, how fast and how long a training runs, but not what it computes. data.path and
# batch may change only if the images and the global batch stay the same, which `reason_not_to_resume` checks.
MAY_CHANGE = (
    "name",
    "data.path",
    "data.stage_dir",
    "data.decoder",
    "data.on_error",
    "data.max_damaged",
    "data.train_images",
    "data.prepare",
    "batch",
    "max_steps",
    "on_nan",
    "log_norms_every_steps",
    "compare_weights_every_steps",
    "log",
    "evaluate",
    "checkpoint",
    "comm.backend",
    "comm.timeout_s",
    "comm.bucket_mib",
    "comm.find_unused_parameters",
    "engine",
    "model.winograd",
    "plan",
    "sweep",
)
ENDLESS = ("constant", "steps")  # schedules whose learning rates do not depend on the last step

Differences = dict[str, tuple[Any, Any]]
"""Dotted key -> old and new value."""


def differences(old: Recipe, new: Recipe) -> Differences:
    """Return the keys in which two recipes differ, comparing absolute paths and ignoring `output`."""
    a, b = values_by_key(old), values_by_key(new)
    if old.model.zeroed_gamma == new.model.zeroed_gamma:  # "auto" is another word for what it means
        a["model.zero_gamma"] = b["model.zero_gamma"]
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


def values_by_key(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's values by dotted key, with absolute paths and without `output`."""
    return flat(with_absolute_paths(recipe).model_dump(by_alias=True, exclude={"output"}))


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def describe_differences(found: Differences) -> str:
    """Format differences: "epochs: 2 -> 3, comm.backend: auto -> gloo"."""
    return ", ".join(f"{key}: {describe_value(old)} -> {describe_value(new)}" for key, (old, new) in found.items())


def describe_value(value: Any) -> str:
    """Format a value as in a recipe file."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(describe_value, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def wording_for(recipe: Recipe) -> Wording:
    """Return how messages spell `resume` and `overwrite`: as arguments of `cputrain.train` for a script's run, else as
    options."""
    return as_argument if recipe.data.path == USER_SAMPLES else as_option


def changes_training(found: Differences, new: Recipe) -> Differences:
    """Return the differences that would change what the training computes from now on."""
    endless = new.schedule.name in ENDLESS and all(phase.restart_rate is None for phase in new.phases)
    allowed = (*MAY_CHANGE, *(("epochs",) if endless else ()))
    return {key: pair for key, pair in found.items() if not any(f"{key}.".startswith(f"{each}.") for each in allowed)}


def reason_not_to_resume(
    folder: Path, old: Recipe, new: Recipe, before: ScaleRecord | None, now: ScaleRecord
) -> str | None:
    """Return why a run cannot continue with this recipe and these workers, and what to do; None if it can."""
    changed = changes_training(differences(old, new), new)
    resume = wording_for(new)("resume", "true")
    if changed:
        return (
            f"{resume}: {describe_differences(changed)} would change what the run in {folder} computes; undo this, or "
            f"start a new run from its weights: model.weights={folder}/checkpoints/best and another output"
        )
    if old.data.kind != new.data.kind:
        return (
            f"{resume}: the run in {folder} was trained on {old.data.kind}, but data.path={new.data.path} is "
            f"{new.data.kind}: restore data.path, or start a new run with another output"
        )
    if before is None:
        return None
    if (now.train_images, now.classes) != (before.train_images, before.classes):
        restore = "restore data.train_images" if new.data.generated else "set data.path to the same images"
        same_data = "use the same data" if new.data.path == USER_SAMPLES else restore
        return (
            f"{resume}: data.path={new.data.path} has {now.train_images:,} training {new.data.unit} of "
            f"{plural(now.classes, 'class')}, but the run in {folder} was trained on {before.train_images:,} of "
            f"{before.classes}: {same_data}"
        )
    if now.global_batch != before.global_batch:
        return (
            f"{resume}: the global batch is {now.global_batch:,} with {plural(now.workers, 'worker')}, but "
            f"{before.global_batch:,} in the run in {folder} ({plural(before.workers, 'worker')}): set "
            f"batch.global={before.global_batch}"
        )
    if new.optim.scale_rate_by == "workers" and now.workers != before.workers:
        return (
            f"{resume}: {plural(now.workers, 'worker')} instead of {before.workers} would change the learning rate of "
            f"the run in {folder}, as optim.scale_rate_by=workers: start {plural(before.workers, 'worker')} again"
        )
    return None


RUN_FILES = (PLAN, ENVIRONMENT, CHECKPOINTS, LOGS, METRICS, REPORT, EVENTS, USAGE, RECIPE)


def run_of(spec: str) -> Path | None:
    """Return the run folder that `spec` or its recipe.yaml names; None if `spec` names a recipe."""
    path = Path(spec)
    folder = path.parent if path.name == RECIPE else path
    # Not Path.is_file, which raises if a word is too long for a path.
    begun = os.path.isfile(folder / RECIPE) and (path == folder or os.path.isfile(folder / EVENTS))  # noqa: PTH113
    return folder if spec and begun and spec not in recipe_names() else None


def load_training(spec: str, settings: Sequence[str] = ()) -> Recipe:
    """Load a recipe like `load_recipe`, or the recipe of a run folder, which may have been moved, with that folder as
    output, or the recipe in a checkpoint, even without its run."""
    if spec and is_checkpoint(Path(spec)):
        return recipe_of(read_manifest(Path(spec)).recipe, Path(spec) / MANIFEST, settings=settings)
    folder = run_of(spec)
    if folder is None:
        named_as_file = Path(spec).suffix in (".yaml", ".yml", ".py")
        if spec and not (spec in recipe_names() or named_as_file or os.path.exists(spec)):  # noqa: PTH110
            raise InputError(f"{shortened(spec)!r} is neither a run folder nor a recipe: {nearest_recipes(spec)}")
        return load_recipe(spec, settings)
    recipe = load_recipe(str(folder / RECIPE), settings)
    elsewhere = any(setting.startswith("output=") for setting in settings)
    return recipe if elsewhere else recipe.model_copy(update={"output": str(folder)})


def checkpoints_of(run: Path | None, named: Sequence[Path], *, last: bool) -> tuple[Path, ...]:
    """Return the named checkpoints (those in a named folder oldest first), else the best or last one of a run.

    Raises InputError if there is none.
    """
    if named and last:
        raise InputError("--checkpoint and --last cannot be used together: remove one")
    if named:
        return tuple(path for each in named for path in _checkpoints_in(each))
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
    found = [each for each in list_checkpoints(path) if is_checkpoint(each)]
    best = path / BEST
    if is_checkpoint(best) and best.resolve() not in [each.resolve() for each in found]:
        found.append(best)
    if not found:
        problem = "is not a checkpoint and contains none" if path.exists() else "does not exist"
        weights = "; to start a training from a file of weights, set model.weights=FILE" if path.is_file() else ""
        raise InputError(
            f"checkpoint {path} {problem}: a run's checkpoints are the folders in its {CHECKPOINTS}/{weights}"
        )
    return found


def check_folder(
    recipe: Recipe, now: ScaleRecord, *, resume: bool, overwrite: bool, restarted: bool = False, job: str = ""
) -> str:
    """Raise InputError if the recipe's folder must not be written to; changes nothing. See `locked` for `restarted` and
    `job`.

    A run that has not trained a step may be replaced by any other. Returns a line about that, or about where a resumed
    run continues and what changes; "" for a new run.
    """
    folder, spell = recipe.folder, wording_for(recipe)
    to_resume, to_overwrite = spell("resume", "true"), spell("overwrite", "true")
    if resume and overwrite:
        raise InputError(f"{to_resume} and {to_overwrite} cannot be used together: remove one")
    check_writable(folder, "output")
    is_free = check_unlocked(folder, restarted=restarted, job=job)
    if resume and not has_run(folder):
        raise InputError(
            f"{to_resume}: {folder} contains no run: remove {to_resume}, or set output to the run's folder"
        )
    if not is_marked(folder):
        if not is_empty(folder):
            raise InputError(f"output {folder} contains other files but no run: set output to a new folder")
        return ""
    starts_over = not resume and is_free and not has_trained(folder)
    if overwrite or starts_over:
        check_removable(folder, RUN_FILES)
    if overwrite or not has_run(folder):  # without a recipe: its removal was interrupted
        return ""
    if starts_over:
        return _starts_over(folder)
    for path in (folder / name for name in RUN_FILES):  # fail now, not when the report is written at the end
        if os.path.lexists(path) and path.is_dir() != (path.name in FOLDERS):
            found = "a broken link" if not path.exists() else "a folder" if path.is_dir() else "a file"
            raise InputError(f"output {folder}: {path} is {found}: move it away, or set output to another folder")
    old = load_recipe(str(folder / RECIPE))
    if resume:
        return _resumption(recipe, old, now)
    if changed := changes_training(differences(old, recipe), recipe):
        raise InputError(
            f"output {folder} contains a run of another recipe ({describe_differences(changed)}): set output to "
            f"another folder, or add {to_overwrite} to delete that run"
        )
    raise InputError(
        f"output {folder} contains a run of this recipe: add {to_resume} or {to_overwrite}, or set output to another "
        "folder"
    )


def job_of(folder: Path) -> str:
    """Return the name of the job that last trained in a run folder; "" if it had none."""
    return str(_read_object(folder / ENVIRONMENT).get("job", ""))


def has_trained(folder: Path) -> bool:
    """Whether the run in a folder may have trained a step: it has a checkpoint, or other events than of a start."""
    events = (event["event"] if event else "" for event in lines_of_events(folder))
    return any((folder / CHECKPOINTS).glob("*")) or any(event not in ("start", "warning") for event in events)


def _starts_over(folder: Path) -> str:
    return f"{folder} starts over, as the run in it had not trained a step"


def has_run(folder: Path) -> bool:
    """Whether a folder contains a run, even one that has not started to train."""
    return is_marked(folder) and (folder / RECIPE).is_file()


def with_same_global_batch(recipe: Recipe, workers: int) -> Recipe:
    """Return the recipe for this number of workers, with the global batch of the run in its folder if that had another
    number of workers; a recipe that sets batch.global stays unchanged."""
    before = _scale_before(recipe.folder)
    if before is None or before.workers == workers or recipe.batch.global_ is not None:
        return recipe
    batch = BatchSection(local=recipe.batch.local, **{"global": before.global_batch})
    return recipe.model_copy(update={"batch": batch})


def _resumption(recipe: Recipe, old: Recipe, now: ScaleRecord) -> str:
    folder = recipe.folder
    if not has_trained(folder):
        return _starts_over(folder)
    saved = list_checkpoints(folder / CHECKPOINTS)
    before = _scale_before(folder)
    if problem := reason_not_to_resume(folder, old, recipe, before, now):
        raise InputError(problem)
    newest = _newest_manifest(folder)  # not the folder's name, which may have been changed
    step = newest.step if newest else step_of(saved[-1]) if saved else None
    where = "from the beginning, as it has no checkpoint yet" if step is None else f"after step {step:,}"
    changed = differences(old, recipe)
    changes = [describe_differences(changed)] if changed else []
    if before and before.workers != now.workers:
        changes.insert(0, f"{plural(now.workers, 'worker')} instead of {before.workers}")
    return f"{folder} continues {where}" + (f", with {', '.join(changes)}" if changes else "")


def _newest_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of the run's newest readable checkpoint."""
    for path in reversed(list_checkpoints(folder / CHECKPOINTS)):
        with suppress(InputError):  # the ranks report damage when they look for the newest intact one
            return read_manifest(path)
    return None


def _scale_before(folder: Path) -> ScaleRecord | None:
    """Return the scale of the run's newest checkpoint, else of its last start; None if neither is known."""
    if manifest := _newest_manifest(folder):
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


def make_folder(recipe: Recipe, *, overwrite: bool, resume: bool = False) -> None:
    """Create the run folder. With `overwrite`, or if an earlier run has not trained a step and is not resumed, first
    remove the files of that run, and no others."""
    folder = recipe.folder
    is_new = not (folder / RECIPE).is_file()  # or an interrupted removal, which left files of a run
    if overwrite or is_new or not (resume or has_trained(folder)):
        remove_run(folder, RUN_FILES)
    folder.mkdir(parents=True, exist_ok=True)
    mark(folder)
    write_text(folder / RECIPE, _given_paths(recipe) + dump_recipe(with_absolute_paths(recipe)))


def _given_paths(recipe: Recipe) -> str:
    """Return a YAML comment with the recipe's relative paths and the directory that they are relative to."""
    given = {
        "data.path": None if recipe.data.generated else recipe.data.path,
        "data.stage_dir": recipe.data.stage_dir,
        "model.weights": recipe.model.weights,
        "output": str(recipe.folder),
    }
    relative = [f"{key}={json.dumps(path)}" for key, path in given.items() if path and not Path(path).is_absolute()]
    return f"# Paths as given in {json.dumps(str(Path.cwd()))}: {', '.join(relative)}\n" if relative else ""


def continues_run(folder: Path, env: Mapping[str, str], *, overwrite: bool) -> bool:
    """Whether this rank's job has failed before and continues the run in a folder. With `overwrite` only a run of its
    own job: an older run is still there if the attempts before ended early."""
    return is_restarted(env) and has_run(folder) and (not overwrite or job_of(folder) == job_in(env))
