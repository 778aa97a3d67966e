"""A run's folder: recipe.yaml, plan.json, environment.json, events.jsonl, checkpoints/, logs/, usage/, report.html."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from affinity.errors import InputError
from affinity.filesystem import check_writable
from affinity.planner.plan import Plan
from affinity.planner.plan_file import PLAN_FILE, plan_to_json
from affinity.wording import counted
from cputrain.checkpoints.folder import BEST, list_checkpoints, step_of
from cputrain.checkpoints.manifest import MANIFEST, Manifest, is_checkpoint, read_manifest
from cputrain.files import write_text
from cputrain.recipe.errors import shortened
from cputrain.recipe.loading import (
    dump_recipe,
    load_recipe,
    nearest_recipes,
    recipe_names,
    recipe_of,
    with_absolute_paths,
)
from cputrain.recipe.schema import BatchSection, Recipe
from cputrain.runs.events import FILE as EVENTS
from cputrain.runs.events import read_events
from cputrain.runs.lock import check_unlocked
from cputrain.runs.removal import check_removable, is_empty, is_marked, mark, remove_run
from cputrain.runs.resume import (
    TrainingScale,
    changes_training,
    describe_differences,
    differences,
    reason_not_to_resume,
)
from mpi.usage.file import FOLDER as USAGE

RECIPE, PLAN, ENVIRONMENT, CHECKPOINTS, LOGS, REPORT = (
    "recipe.yaml",
    PLAN_FILE,
    "environment.json",
    "checkpoints",
    "logs",
    "report.html",
)
METRICS = "metrics"
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
        raise InputError(f"{best.parent if last else best} is not there: " + _instead(saved))
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


def _instead(saved: Sequence[Path]) -> str:
    return f"--last evaluates {saved[-1].name}" if saved else "the run has saved no checkpoint yet"


def check_folder(
    recipe: Recipe, now: TrainingScale, *, resume: bool, overwrite: bool, restarted: bool = False, job: str = ""
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
    try:
        environment = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(environment.get("job", "")) if isinstance(environment, dict) else ""


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


def _resumption(recipe: Recipe, old: Recipe, now: TrainingScale) -> str:
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


def _scale_before(folder: Path) -> TrainingScale | None:
    """The scale of the run's newest checkpoint, else of its last start; None where neither tells."""
    if manifest := _newest_manifest(folder):
        return TrainingScale(**manifest.scale.model_dump())
    starts = [event for event in read_events(folder) if event["event"] == "start"]
    return TrainingScale.of_start(starts[-1]) if starts else None


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
        write_plan(folder / PLAN, plan)


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


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan as JSON, for `affinity.bind` to read."""
    write_text(path, plan_to_json(plan))
