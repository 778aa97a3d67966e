"""Runs from their folders, compared: their results, the settings in which they differ, and their curves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from affinity.errors import InputError
from cputrain.recipe.derivation import derive
from cputrain.recipe.schema import Recipe
from cputrain.report.run import Run, read_run, unit_of
from cputrain.report.step_times import rank_times
from cputrain.report.tables import Table, thin
from cputrain.report.training_charts import training_tables
from cputrain.runs.events import FILE as EVENTS
from cputrain.runs.folder import RECIPE
from cputrain.runs.resume import describe_value, values_by_key
from cputrain.sweep.outcomes import STOPPED
from cputrain.sweep.results import RunResult, TrainingSetup, result_in
from cputrain.sweep.variants import Variant, label_of

NOT_COMPARED = ("name", "sweep")  # keys and sections that do not change a training


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run of a comparison. `values` are its recipe's by dotted key, None where the recipe could not be read;
    `shares` the percent of a step that it computes, waits for other ranks and for images."""

    name: str
    folder: Path
    result: RunResult
    values: dict[str, Any] | None
    tables: dict[str, Table]
    shares: tuple[float, ...]
    unit: str
    problems: tuple[str, ...]


def runs_in(folder: Path) -> tuple[Path, ...]:
    """The folders of a sweep's runs, or those of any folder's, in the order of their names."""
    found = {path.parent for name in (EVENTS, RECIPE) for path in folder.glob(f"*/{name}")}
    return tuple(sorted(found))


def compare_runs(folders: Sequence[Path], most_rows: int) -> tuple[ComparedRun, ...]:
    """The runs with the settings in which they differ, in the order of the folders; each has at most about
    `most_rows` rows in each of its tables. Raises InputError where a folder contains no run."""
    runs = [_read(folder, most_rows) for folder in folders]
    keys = differing_keys([run.values for run in runs if run.values is not None])
    return tuple(_with_settings(run, keys) for run in runs)


def differing_keys(values: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The keys that do not have the same value in all recipes, in the recipes' order."""
    every = dict.fromkeys(key for each in values for key in each)
    compared = (key for key in every if key.partition(".")[0] not in NOT_COMPARED)
    return tuple(key for key in compared if any(each.get(key) != values[0].get(key) for each in values))


def _with_settings(run: ComparedRun, keys: Sequence[str]) -> ComparedRun:
    settings = tuple((key, describe_value((run.values or {}).get(key))) for key in keys if run.values is not None)
    return replace(run, result=replace(run.result, settings=settings, label=label_of(settings, without=("seed",))))


def _read(folder: Path, most_rows: int) -> ComparedRun:
    """One run, of which only what is compared stays in memory."""
    run = read_run(folder)
    problems = list(run.problems)
    try:
        result = result_in(run.log, Variant(settings=()), _setup(run), folder)
    except InputError as error:
        problems.append(str(error))
        result = RunResult(label="", run=str(folder), settings=(), status=STOPPED, setup=_setup(run))
    if result.status == STOPPED:
        result = replace(result, status=run.status())
    times = [each.percents for each in rank_times(run)]
    return ComparedRun(
        name=run.name,
        folder=folder,
        result=result,
        values=values_by_key(run.recipe) if run.recipe else None,
        tables={name: thin(table, most_rows) for name, table in training_tables(run).items()},
        shares=tuple(map(float, np.mean(times, axis=0))) if times else (),
        unit=unit_of(run.start),
        problems=tuple(problems),
    )


def _setup(run: Run) -> TrainingSetup:
    """The sizes of a run, as far as its recipe and its last start tell."""
    recipe = run.recipe or Recipe()
    workers = run.start.get("workers") or None
    return TrainingSetup(
        workers=workers,
        local_batch=recipe.batch.local,
        global_batch=run.start.get("global_batch") or None,
        epochs=recipe.epochs,
        optimizer=recipe.optim.name,
        weight_decay=recipe.optim.weight_decay,
        peak_rate=_peak_rate(recipe, workers, run.start.get("train_images")),
    )


def _peak_rate(recipe: Recipe, workers: int | None, images: int | None) -> float | None:
    if not workers or not images:
        return None
    try:
        return derive(recipe, ppn=workers, nodes=1, images=images).peak_rate
    except InputError:  # such as a run of a version that counted images in another way
        return None
