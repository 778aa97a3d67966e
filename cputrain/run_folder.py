"""A run's folder: recipe.yaml, plan.json, environment.json, events.jsonl, checkpoints/, logs/, usage/, report.html."""

import shutil
from pathlib import Path

from affinity.errors import InputError
from affinity.filesystem import check_writable
from affinity.plan import Plan
from affinity.plan_file import plan_to_json
from cputrain.events import FILE as EVENTS
from cputrain.files import write_atomic
from cputrain.recipe import dump_recipe, load_recipe
from cputrain.schema import Recipe
from mpi.usage_file import FOLDER as USAGE

RECIPE, PLAN, ENVIRONMENT, CHECKPOINTS, LOGS, REPORT = (
    "recipe.yaml",
    "plan.json",
    "environment.json",
    "checkpoints",
    "logs",
    "report.html",
)
OURS = (RECIPE, PLAN, ENVIRONMENT, CHECKPOINTS, LOGS, REPORT, EVENTS, USAGE)


def check_folder(recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
    """Raise InputError when the recipe's folder may not be written to; changes nothing."""
    folder = recipe.folder
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other: give one")
    check_writable(folder, "output")
    if not (folder / RECIPE).is_file():
        if resume:
            raise InputError(f"--resume: {folder} holds no run: leave --resume out, or set output to the run's folder")
        if folder.is_dir() and any(folder.iterdir()):
            raise InputError(f"output {folder} holds other files and no run: set output to a new folder")
        return
    if not (resume or overwrite):
        other = recipe_difference(recipe, load_recipe(str(folder / RECIPE)))
        what = f"a run of another recipe ({other})" if other else "a run of this recipe"
        raise InputError(f"output {folder} holds {what}: add --resume or --overwrite, or set output to another folder")


def recipe_difference(new: Recipe, old: Recipe) -> str:
    """The sections in which two recipes differ, as "key: old -> new"; empty when they are the same."""
    a, b = old.model_dump(), new.model_dump()
    parts = []
    for key in a:
        if isinstance(a[key], dict):
            parts += [f"{key}.{k}: {a[key][k]} -> {b[key][k]}" for k in a[key] if a[key][k] != b[key][k]]
        elif a[key] != b[key]:
            parts.append(f"{key}: {a[key]} -> {b[key]}")
    return ", ".join(parts)


def make_folder(recipe: Recipe, plan: Plan | None, *, overwrite: bool) -> None:
    """Make the run's folder; with overwrite, take away what a run has left there and nothing else."""
    folder = recipe.folder
    if overwrite:
        for name in OURS:
            path = folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / RECIPE, dump_recipe(recipe).encode())
    if plan is not None:
        write_plan(folder / PLAN, plan)


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan where `affinity.bind` can read it."""
    write_atomic(path, plan_to_json(plan).encode())
