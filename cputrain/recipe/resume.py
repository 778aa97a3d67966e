"""The recipe of a run: load it, compare it with another, and decide whether the run may continue with that."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import check_writable
from cputrain.affinity.wording import plural
from cputrain.checkpoint.files import MANIFEST, is_checkpoint, list_checkpoints, step_of
from cputrain.data.settings import USER_SAMPLES
from cputrain.files import CHECKPOINTS, RECIPE, recipe_names, write_text
from cputrain.manifest import ScaleRecord, read_manifest
from cputrain.recipe.keys import shortened
from cputrain.recipe.loading import dump_recipe, load_recipe, nearest_recipes, recipe_of
from cputrain.recipe.schema import BatchSection, PhaseSection, Recipe, ScheduleSection
from cputrain.runs.folder import (
    FOLDERS,
    RUN_FILES,
    check_removable,
    check_unlocked,
    describe_value,
    flat,
    has_run,
    has_trained,
    is_empty,
    is_marked,
    newest_manifest,
    run_of,
    scale_before,
    starts_over,
)

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


def first_precision(folder: Path) -> str | None:
    """Return the precision of the run in a folder; None if it has not trained a step."""
    return load_recipe(str(folder / RECIPE)).precision if has_run(folder) and has_trained(folder) else None


def differences(old: Recipe, new: Recipe) -> Differences:
    """Return the keys in which two recipes differ, comparing absolute paths and ignoring `output`."""
    a, b = values_by_key(old), values_by_key(new)
    if old.model.zeroed_gamma == new.model.zeroed_gamma:  # "auto" is another word for what it means
        a["model.zero_gamma"] = b["model.zero_gamma"]
    if "auto" in (old.precision, new.precision):  # the other one may be what was chosen
        a["precision"] = b["precision"]
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


def values_by_key(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's values by dotted key, with absolute paths and without `output`."""
    return flat(recipe.with_absolute_paths().model_dump(by_alias=True, exclude={"output"}))


def describe_differences(found: Differences) -> str:
    """Format differences: "epochs: 2 -> 3, comm.backend: auto -> gloo"."""
    return ", ".join(f"{key}: {describe_value(old)} -> {describe_value(new)}" for key, (old, new) in found.items())


def changes_training(found: Differences, schedule: ScheduleSection, phases: tuple[PhaseSection, ...]) -> Differences:
    """Return the differences that would change what a training with this schedule computes from now on."""
    endless = schedule.name in ENDLESS and all(phase.restart_rate is None for phase in phases)
    allowed = (*MAY_CHANGE, *(("epochs",) if endless else ()))
    return {key: pair for key, pair in found.items() if not any(f"{key}.".startswith(f"{each}.") for each in allowed)}


def reason_not_to_resume(
    folder: Path, old: Recipe, new: Recipe, before: ScaleRecord | None, now: ScaleRecord
) -> str | None:
    """Return why a run cannot continue with this recipe and these workers, and what to do; None if it can."""
    changed = changes_training(differences(old, new), new.schedule, new.phases)
    resume = new.wording("resume", "true")
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


def check_folder(
    recipe: Recipe, now: ScaleRecord, *, resume: bool, overwrite: bool, restarted: bool = False, job: str = ""
) -> str:
    """Raise InputError if the recipe's folder must not be written to; changes nothing. See `locked` for `restarted` and
    `job`.

    A run that has not trained a step may be replaced by any other. Returns a line about that, or about where a resumed
    run continues and what changes; "" for a new run.
    """
    folder, spell = recipe.folder, recipe.wording
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
    replaces_start = not resume and is_free and not has_trained(folder)
    if overwrite or replaces_start:
        check_removable(folder, RUN_FILES)
    if overwrite or not has_run(folder):  # without a recipe: its removal was interrupted
        return ""
    if replaces_start:
        return starts_over(folder)
    for path in (folder / name for name in RUN_FILES):  # fail now, not when the report is written at the end
        if os.path.lexists(path) and path.is_dir() != (path.name in FOLDERS):
            found = "a broken link" if not path.exists() else "a folder" if path.is_dir() else "a file"
            raise InputError(f"output {folder}: {path} is {found}: move it away, or set output to another folder")
    old = load_recipe(str(folder / RECIPE))
    if resume:
        return _resumption(recipe, old, now)
    if changed := changes_training(differences(old, recipe), recipe.schedule, recipe.phases):
        raise InputError(
            f"output {folder} contains a run of another recipe ({describe_differences(changed)}): set output to "
            f"another folder, or add {to_overwrite} to delete that run"
        )
    raise InputError(
        f"output {folder} contains a run of this recipe: add {to_resume} or {to_overwrite}, or set output to another "
        "folder"
    )


def with_same_global_batch(recipe: Recipe, workers: int) -> Recipe:
    """Return the recipe for this number of workers, with the global batch of the run in its folder if that had another
    number of workers; a recipe that sets batch.global stays unchanged."""
    before = scale_before(recipe.folder)
    if before is None or before.workers == workers or recipe.batch.global_ is not None:
        return recipe
    batch = BatchSection(local=recipe.batch.local, **{"global": before.global_batch})
    return recipe.model_copy(update={"batch": batch})


def _resumption(recipe: Recipe, old: Recipe, now: ScaleRecord) -> str:
    folder = recipe.folder
    if not has_trained(folder):
        return starts_over(folder)
    saved = list_checkpoints(folder / CHECKPOINTS)
    before = scale_before(folder)
    if problem := reason_not_to_resume(folder, old, recipe, before, now):
        raise InputError(problem)
    newest = newest_manifest(folder)  # not the folder's name, which may have been changed
    step = newest.step if newest else step_of(saved[-1]) if saved else None
    where = "from the beginning, as it has no checkpoint yet" if step is None else f"after step {step:,}"
    changed = differences(old, recipe)
    changes = [describe_differences(changed)] if changed else []
    if before and before.workers != now.workers:
        changes.insert(0, f"{plural(now.workers, 'worker')} instead of {before.workers}")
    return f"{folder} continues {where}" + (f", with {', '.join(changes)}" if changes else "")


def recipe_text(recipe: Recipe) -> str:
    """Return the text of a run's recipe.yaml: the recipe with absolute paths, below a comment with those given relative
    to the working directory."""
    given = {
        "data.path": None if recipe.data.generated else recipe.data.path,
        "data.stage_dir": recipe.data.stage_dir,
        "model.weights": recipe.model.weights,
        "output": str(recipe.folder),
    }
    relative = [f"{key}={json.dumps(path)}" for key, path in given.items() if path and not Path(path).is_absolute()]
    comment = f"# Paths as given in {json.dumps(str(Path.cwd()))}: {', '.join(relative)}\n" if relative else ""
    return comment + dump_recipe(recipe.with_absolute_paths())


def record_precision(folder: Path, precision: str) -> None:
    """Write the precision chosen for a run over the "auto" in its recipe.yaml."""
    path = folder / RECIPE
    text = path.read_text(encoding="utf-8")
    write_text(path, text.replace("\nprecision: auto\n", f"\nprecision: {precision}\n"))
