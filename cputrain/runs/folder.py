"""A run's folder: its files, its lock, its removal, what may differ when it is resumed, and attempts of a job."""

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
from cputrain.affinity.filesystem import check_writable
from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.planner.plan_file import plan_to_json
from cputrain.affinity.wording import counted
from cputrain.checkpoints import (
    BEST,
    MANIFEST,
    Manifest,
    ScaleRecord,
    is_checkpoint,
    list_checkpoints,
    read_manifest,
    step_of,
)
from cputrain.files import CHECKPOINTS, ENVIRONMENT, LOGS, METRICS, PLAN, RECIPE, REPORT, write_text
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
from cputrain.recipe.schema import OWN_SAMPLES, BatchSection, Recipe
from cputrain.runs.events import FILE as EVENTS
from cputrain.runs.events import read_events
from cputrain.variables import is_restarted, job_in

MARK = ".cputrain-run"
# What a folder of a run contains that its name leads to somewhere else; there, other files are left alone.
LINKED = {"checkpoints": ("step-*", "best", ".*.partial"), "logs": ("rank-*.log",), "usage": ("*.jsonl",)}
FOLDERS = (*LINKED, METRICS)


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


LOCK = ".cputrain-lock"


@contextmanager
def locked(folder: Path, *, restarted: bool = False, job: str = "") -> Iterator[None]:
    """Keep other trainings out of a run's folder, which is made where it is not there. `job` is the name of the job
    that this one belongs to.

    Raises InputError where another training is in it; not with `restarted` where that one is of the same job: who has
    started this one knows that the one before has ended, and a file server may keep the lock of a crashed host.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark(folder)
    with (folder / LOCK).open("ab") as file:
        _take(file, folder, restarted=restarted, job=job)
        with suppress(OSError):  # a full disk: the lock holds all the same
            (folder / LOCK).write_text(
                json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "job": job}), encoding="utf-8"
            )
        yield


def check_unlocked(folder: Path, *, restarted: bool = False, job: str = "") -> None:
    """Raise InputError where `locked` would; changes nothing."""
    if (folder / LOCK).is_file():
        with (folder / LOCK).open("ab") as file:
            _take(file, folder, restarted=restarted, job=job)


def _take(file: IO[bytes], folder: Path, *, restarted: bool, job: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _read_object(folder / LOCK)
        if not restarted or holder.get("job", job) != job:
            known = {"pid", "host"} <= holder.keys()
            who = f"process {holder['pid']} on {holder['host']}" if known else "another process"
            raise InputError(
                f"output {folder} is in use: {who} trains there: wait for its end, or set output to another folder; "
                f"if that host has crashed, remove {folder / LOCK}"
            ) from None
    except OSError:
        return  # a file system without locks


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# Keys and sections that decide where, how fast and how long a training runs, not what it computes; for data.path and
# batch this holds while the images and the global batch stay the same, which `reason_not_to_resume` checks.
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
    "engine",
    "model.winograd",
    "plan",
    "sweep",
)
ENDLESS = ("constant", "steps")  # schedules whose rates do not depend on the last step

Differences = dict[str, tuple[Any, Any]]
"""Dotted key -> old and new value."""


def differences(old: Recipe, new: Recipe) -> Differences:
    """The keys in which two recipes differ; paths are compared as absolute ones, and `output` is ignored."""
    a, b = values_by_key(old), values_by_key(new)
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


def values_by_key(recipe: Recipe) -> dict[str, Any]:
    """The recipe's values by dotted key, with absolute paths and without `output`."""
    return flat(with_absolute_paths(recipe).model_dump(by_alias=True, exclude={"output"}))


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def describe_differences(found: Differences) -> str:
    """ "epochs: 2 -> 3, comm.backend: auto -> gloo"."""
    return ", ".join(f"{key}: {describe_value(old)} -> {describe_value(new)}" for key, (old, new) in found.items())


def describe_value(value: Any) -> str:
    """A key's value as a recipe has it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(describe_value, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def changes_training(found: Differences, new: Recipe) -> Differences:
    """The differences that would change what the training computes from here on."""
    endless = new.schedule.name in ENDLESS and all(phase.restart_rate is None for phase in new.phases)
    allowed = (*MAY_CHANGE, *(("epochs",) if endless else ()))
    return {key: pair for key, pair in found.items() if not any(f"{key}.".startswith(f"{each}.") for each in allowed)}


def reason_not_to_resume(
    folder: Path, old: Recipe, new: Recipe, before: ScaleRecord | None, now: ScaleRecord
) -> str | None:
    """Why the run in a folder cannot continue with this recipe and these workers, and what to do; None where it can."""
    changed = changes_training(differences(old, new), new)
    if changed:
        return (
            f"--resume: {describe_differences(changed)} would change what the run in {folder} computes: undo that, or "
            f"start a new run from its weights: model.weights={folder}/checkpoints/best and another output"
        )
    if old.data.kind != new.data.kind:
        return (
            f"--resume: the run in {folder} was trained on {old.data.kind}, data.path={new.data.path} is "
            f"{new.data.kind}: set data.path back, or start a new run with another output"
        )
    if before is None:
        return None
    if (now.train_images, now.classes) != (before.train_images, before.classes):
        back = "set data.train_images back" if new.data.generated else "set data.path to the same images"
        same_data = "give the same data" if new.data.path == OWN_SAMPLES else back
        return (
            f"--resume: data.path={new.data.path} has {now.train_images:,} training {new.data.unit} of {now.classes} "
            f"classes, the run in {folder} was trained on {before.train_images:,} of {before.classes}: "
            f"{same_data}"
        )
    if now.global_batch != before.global_batch:
        return (
            f"--resume: the global batch is {now.global_batch:,} with {counted(now.workers, 'worker')}, but "
            f"{before.global_batch:,} in the run in {folder} ({counted(before.workers, 'worker')}): set "
            f"batch.global={before.global_batch}"
        )
    if new.optim.scale_rate_by == "workers" and now.workers != before.workers:
        return (
            f"--resume: optim.scale_rate_by=workers, and {counted(now.workers, 'worker')} instead of "
            f"{before.workers} would change the learning rate of the run in {folder}: start "
            f"{counted(before.workers, 'worker')} again"
        )
    return None


RUN_FILES = (PLAN, ENVIRONMENT, CHECKPOINTS, LOGS, METRICS, REPORT, EVENTS, USAGE, RECIPE)


def run_of(spec: str) -> Path | None:
    """The folder of the run that `spec` names, or whose recipe.yaml it names; None where `spec` names a recipe."""
    path = Path(spec)
    folder = path.parent if path.name == RECIPE else path
    # os.path's: a word may be too long for a path, at which Path.is_file raises.
    begun = os.path.isfile(folder / RECIPE) and (path == folder or os.path.isfile(folder / EVENTS))  # noqa: PTH113
    return folder if spec and begun and spec not in recipe_names() else None


def load_training(spec: str, settings: Sequence[str] = ()) -> Recipe:
    """Like `load_recipe`; of a run's folder, which may have been moved, the recipe with that folder as output; of a
    checkpoint, which may be all that is left of its run, the recipe in it."""
    if spec and is_checkpoint(Path(spec)):
        return recipe_of(read_manifest(Path(spec)).recipe, Path(spec) / MANIFEST, settings=settings)
    folder = run_of(spec)
    if folder is None:
        named_as_file = Path(spec).suffix in (".yaml", ".yml", ".py")
        if spec and not (spec in recipe_names() or named_as_file or os.path.exists(spec)):  # noqa: PTH110
            raise InputError(f"{shortened(spec)!r} is neither a run's folder nor a recipe: {nearest_recipes(spec)}")
        return load_recipe(spec, settings)
    recipe = load_recipe(str(folder / RECIPE), settings)
    elsewhere = any(setting.startswith("output=") for setting in settings)
    return recipe if elsewhere else recipe.model_copy(update={"output": str(folder)})


def checkpoints_of(run: Path | None, named: Sequence[Path], *, last: bool) -> tuple[Path, ...]:
    """The named checkpoints (those in a named folder oldest first), or else the best or last one of a run.

    Raises InputError where there is none.
    """
    if named and last:
        raise InputError("--checkpoint and --last cannot be used together: remove one")
    if named:
        return tuple(path for each in named for path in _checkpoints_in(each))
    if run is None:
        raise InputError("eval of a recipe needs --checkpoint PATH: add it, or name a run's folder instead")
    saved = list_checkpoints(run / CHECKPOINTS)
    if last and saved:
        return (saved[-1],)
    best = run / CHECKPOINTS / BEST
    if last or not is_checkpoint(best):
        instead = f"--last evaluates {saved[-1].name}" if saved else "the run has saved no checkpoint yet"
        raise InputError(f"{best.parent if last else best} is not there: {instead}")
    return (best,)


def _checkpoints_in(path: Path) -> list[Path]:
    if is_checkpoint(path):
        return [path]
    found = [each for each in list_checkpoints(path) if is_checkpoint(each)]
    best = path / BEST
    if is_checkpoint(best) and best.resolve() not in [each.resolve() for each in found]:
        found.append(best)
    if not found:
        problem = "is not a checkpoint, and has none in it" if path.exists() else "is not there"
        weights = "; a training starts from a file of weights by model.weights=FILE" if path.is_file() else ""
        raise InputError(
            f"checkpoint {path} {problem}: a run's checkpoints are the folders in its {CHECKPOINTS}/{weights}"
        )
    return found


def check_folder(
    recipe: Recipe, now: ScaleRecord, *, resume: bool, overwrite: bool, restarted: bool = False, job: str = ""
) -> str:
    """Raise InputError where the recipe's folder may not be written to; changes nothing. `restarted`, `job`: as in
    `locked`.

    Returns one line about what a resumed run continues from and changes; "" where nothing is resumed.
    """
    folder = recipe.folder
    if resume and overwrite:
        raise InputError("--resume and --overwrite cannot be used together: remove one")
    check_writable(folder, "output")
    check_unlocked(folder, restarted=restarted, job=job)
    if resume and not has_run(folder):
        raise InputError(f"--resume: {folder} contains no run: remove --resume, or set output to the run's folder")
    if not is_marked(folder):
        if not is_empty(folder):
            raise InputError(f"output {folder} contains other files but no run: set output to a new folder")
        return ""
    if overwrite:
        check_removable(folder, RUN_FILES)
    if overwrite or not has_run(folder):  # without a recipe: one whose removal was interrupted
        return ""
    for path in (folder / name for name in RUN_FILES):  # a report that cannot be written would end the training last
        if os.path.lexists(path) and path.is_dir() != (path.name in FOLDERS):
            found = "a link that leads nowhere" if not path.exists() else "a folder" if path.is_dir() else "a file"
            raise InputError(f"output {folder}: {path} is {found}: move it away, or set output to another folder")
    old = load_recipe(str(folder / RECIPE))
    if resume:
        return _resumption(recipe, old, now)
    if changed := changes_training(differences(old, recipe), recipe):
        raise InputError(
            f"output {folder} contains a run of another recipe ({describe_differences(changed)}): set output to "
            "another folder, or add --overwrite to delete that run"
        )
    raise InputError(
        f"output {folder} contains a run of this recipe: add --resume or --overwrite, or set output to another folder"
    )


def job_of(folder: Path) -> str:
    """The name of the job that trained last in a run's folder; "" where it had none."""
    return str(_read_object(folder / ENVIRONMENT).get("job", ""))


def has_run(folder: Path) -> bool:
    """Whether a folder contains a run, which may not have begun to train."""
    return is_marked(folder) and (folder / RECIPE).is_file()


def with_same_global_batch(recipe: Recipe, workers: int) -> Recipe:
    """The recipe for this number of workers, with the global batch of the run in its folder, if that had another
    number; a recipe that sets its global batch stays as it is."""
    before = _scale_before(recipe.folder)
    if before is None or before.workers == workers or recipe.batch.global_ is not None:
        return recipe
    batch = BatchSection(local=recipe.batch.local, **{"global": before.global_batch})
    return recipe.model_copy(update={"batch": batch})


def _resumption(recipe: Recipe, old: Recipe, now: ScaleRecord) -> str:
    folder = recipe.folder
    saved = list_checkpoints(folder / CHECKPOINTS)
    if not saved and all(event["event"] != "step" for event in read_events(folder)):
        return f"{folder} starts anew: the run in it had not trained a step"
    before = _scale_before(folder)
    if problem := reason_not_to_resume(folder, old, recipe, before, now):
        raise InputError(problem)
    newest = _newest_manifest(folder)  # its step, as somebody may have renamed the folder
    step = newest.step if newest else step_of(saved[-1]) if saved else None
    where = "from the start, as it has no checkpoint yet" if step is None else f"after step {step:,}"
    changed = differences(old, recipe)
    changes = [describe_differences(changed)] if changed else []
    if before and before.workers != now.workers:
        changes.insert(0, f"{counted(now.workers, 'worker')} instead of {before.workers}")
    return f"{folder} continues {where}" + (f", with {', '.join(changes)}" if changes else "")


def _newest_manifest(folder: Path) -> Manifest | None:
    """That of the run's newest checkpoint that can be read."""
    for path in reversed(list_checkpoints(folder / CHECKPOINTS)):
        with suppress(InputError):  # the ranks look for the newest one that is good, and say what is wrong
            return read_manifest(path)
    return None


def _scale_before(folder: Path) -> ScaleRecord | None:
    """The scale of the run's newest checkpoint, else of its last start; None where neither tells."""
    if manifest := _newest_manifest(folder):
        return manifest.scale
    starts = [event for event in read_events(folder) if event["event"] == "start"]
    names = ScaleRecord.model_fields.keys()
    if not starts or not names <= starts[-1].keys() or not starts[-1]["workers"]:
        return None
    return ScaleRecord(**{name: starts[-1][name] for name in names})


def finished(folder: Path, last_step: int) -> str | None:
    """A message about a run that has finished with `last_step` or a later one; None of any other run."""
    ended = [event for event in read_events(folder) if event["event"] == "end" and event["status"] == "done"]
    if not ended or ended[-1]["steps"] < last_step:
        return None
    end = ended[-1]
    figures = [
        f"{name} {end[key]:.2f} %" for name, key in (("top-1", "top1"), ("top-5", "top5")) if end[key] is not None
    ]
    if not figures and end.get("val_loss") is not None:
        figures = [f"validation loss {end['val_loss']:.4f}"]
    result = ", ".join([f"{end['steps']:,} steps", *figures])
    return f"{folder} is finished: {result}; nothing to do"


def make_folder(recipe: Recipe, plan: Plan | None, *, overwrite: bool) -> None:
    """Make the run's folder; `overwrite` first removes the files of an earlier run, and no others."""
    folder = recipe.folder
    if overwrite or not (folder / RECIPE).is_file():  # the rest of one whose removal was interrupted
        remove_run(folder, RUN_FILES)
    folder.mkdir(parents=True, exist_ok=True)
    mark(folder)
    write_text(folder / RECIPE, _given_paths(recipe) + dump_recipe(with_absolute_paths(recipe)))
    if plan is not None:
        write_text(folder / PLAN, plan_to_json(plan))


def _given_paths(recipe: Recipe) -> str:
    """A comment with the recipe's relative paths and the folder that they are relative to."""
    given = {
        "data.path": None if recipe.data.generated else recipe.data.path,
        "data.stage_dir": recipe.data.stage_dir,
        "model.weights": recipe.model.weights,
        "output": str(recipe.folder),
    }
    relative = [f"{key}={json.dumps(path)}" for key, path in given.items() if path and not Path(path).is_absolute()]
    return f"# Paths as given in {json.dumps(str(Path.cwd()))}: {', '.join(relative)}\n" if relative else ""


def continues_run(folder: Path, env: Mapping[str, str], *, overwrite: bool) -> bool:
    """Whether this rank's job has failed before and continues the run in a folder. With `overwrite` one of its own: an
    older one is still there where the attempts before have ended early."""
    return is_restarted(env) and has_run(folder) and (not overwrite or job_of(folder) == job_in(env))
