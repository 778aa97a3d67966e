"""Comparison of runs: tables and an HTML page."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import plural
from cputrain.files import RECIPE, REPORT, write_text
from cputrain.report.charts import (
    Chart,
    Line,
    Table,
    charts_data,
    drawn_charts,
    mean_shares,
    rank_times,
    rows_per_run,
    thin_table,
    training_tables,
)
from cputrain.report.page import render_page
from cputrain.report.run import default_settings, read_run, unit_of
from cputrain.rows import Column, Rows
from cputrain.runs.events import FILE as EVENTS
from cputrain.runs.folder import describe_value
from cputrain.studies.sweep.results import (
    ACHIEVED,
    BASELINE_NOTE,
    ENDED_BY,
    FOLDER,
    RULE,
    compare_workers,
    comparison_rows,
)
from cputrain.studies.sweep.trainings import STOPPED, RunResult, Variant, result_in, settings_label, setup_of_run

NOT_COMPARED = ("name", "sweep")  # keys and sections that do not change a training
SHARES = ("compute %", "communication wait %", "data wait %")
SMOOTHED = ("loss", "images_per_s")  # measures that are recorded per step
CHARTS = (
    ("top1", "Validation top-1", "%", "epochs", "val_top1", False),
    ("loss", "Training loss", "", "steps", "loss", False),
    ("val-loss", "Validation loss", "", "epochs", "val_loss", False),
    ("train-top1", "Training top-1", "%", "epochs", "train_top1", False),
    ("throughput", "Throughput", "images/s", "steps", "images_per_s", True),
    ("rate", "Learning rate", "", "steps", "rate", True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run of a comparison. `values` are its recipe's values by dotted key, None if the recipe could not be read;
    `shares` the percentages of a step spent computing, waiting for other ranks and waiting for images."""

    name: str
    folder: Path
    result: RunResult
    values: dict[str, Any] | None
    tables: dict[str, Table]
    shares: tuple[float, ...]
    unit: str
    problems: tuple[str, ...]


def runs_in(folder: Path) -> tuple[Path, ...]:
    """Return the run folders directly inside a folder, such as a sweep's, sorted by name."""
    found = {path.parent for name in (EVENTS, RECIPE) for path in folder.glob(f"*/{name}")}
    return tuple(sorted(found))


def compare_runs(folders: Sequence[Path], most_rows: int) -> tuple[ComparedRun, ...]:
    """Read the runs, in the order of the folders, with the settings in which they differ; their tables are thinned to
    about `most_rows` rows each. Raises InputError if a folder contains no run."""
    runs = [_read(folder, most_rows) for folder in folders]
    keys = differing_keys([run.values for run in runs if run.values is not None])
    return tuple(_with_settings(run, keys) for run in runs)


def differing_keys(values: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the keys whose values differ between the recipes, in the recipes' order."""
    every = dict.fromkeys(key for values_of_run in values for key in values_of_run)
    compared = (key for key in every if key.partition(".")[0] not in NOT_COMPARED)
    return tuple(
        key for key in compared if any(values_of_run.get(key) != values[0].get(key) for values_of_run in values)
    )


def _with_settings(run: ComparedRun, keys: Sequence[str]) -> ComparedRun:
    settings = tuple((key, describe_value((run.values or {}).get(key))) for key in keys if run.values is not None)
    return replace(
        run, result=replace(run.result, settings=settings, label=settings_label(settings, without=("seed",)))
    )


def _read(folder: Path, most_rows: int) -> ComparedRun:
    """Read one run, keeping only what the comparison needs in memory."""
    run = read_run(folder)
    problems = list(run.problems)
    try:
        result = result_in(run.log, Variant(settings=()), setup_of_run(run), folder)
    except InputError as error:
        problems.append(str(error))
        result = RunResult(label="", run=str(folder), settings=(), status=STOPPED, setup=setup_of_run(run))
    if result.status == STOPPED:
        result = replace(result, status=run.status())
    return ComparedRun(
        name=run.name,
        folder=folder,
        result=result,
        values=run.settings,
        tables={name: thin_table(table, most_rows) for name, table in training_tables(run).items()},
        shares=tuple(share for _, share in mean_shares(rank_times(run))),
        unit=unit_of(run.start),
        problems=tuple(problems),
    )


def write_comparison(folders: Sequence[Path], out: Path, title: str) -> tuple[Path, Path, Path]:
    """Write the page to `out`, and the tables beside it as .md and .csv; return the three paths. Raises InputError."""
    runs = compare_runs(folders, rows_per_run(len(folders)))
    names = run_names(runs)
    table = result_table(runs, names)
    workers = comparison_rows(compare_workers([run.result for run in runs]))
    html = _html(runs, names, out, title=title, table=table, workers=workers)
    study = f"\n## Workers\n\n{workers.markdown()}\n{RULE}; {BASELINE_NOTE}\n" if workers.rows else ""
    paths = out, out.with_suffix(".md"), out.with_suffix(".csv")
    for path, text in zip(paths, (html, f"# {title}\n\n{table.markdown()}{study}", table.csv()), strict=True):
        write_text(path, text)
    return paths


def run_names(runs: Sequence[ComparedRun]) -> tuple[str, ...]:
    """Return a unique name for each run: the settings in which it differs, if they are short and unique, or its
    folder."""
    labels = [settings_label(run.result.settings, without=()) for run in runs]
    unique = all(labels) and len(set(labels)) == len(labels) and max(map(len, labels)) <= 60
    folders = [run.name for run in runs]
    if unique:
        return tuple(labels)
    return tuple(folders if len(set(folders)) == len(folders) else (str(run.folder) for run in runs))


def result_table(runs: Sequence[ComparedRun], names: Sequence[str]) -> Rows:
    """Return one row per run: name, results, and the settings in which the runs differ; empty columns are omitted."""

    def result(column: Column) -> Column:
        return replace(column, value=lambda run: column.of(run.result))

    def share(part: int) -> Callable[[ComparedRun], float | None]:
        return lambda run: run.shares[part] if run.shares else None

    def setting(key: str) -> Callable[[ComparedRun], str]:
        return lambda run: dict(run.result.settings).get(key, "")

    keys = dict.fromkeys(key for run in runs for key, _ in run.result.settings)
    columns = (
        Column("run", "name"),
        Column("workers", "result.setup.workers", ","),
        Column("global batch", "result.setup.global_batch", ","),
        *(result(column) for column in ACHIEVED if column.name not in (ENDED_BY, FOLDER)),
        *(Column(head, share(i), ".1f") for i, head in enumerate(SHARES)),
        *(Column(key, setting(key)) for key in keys),
        *(result(column) for column in ACHIEVED if column.name == ENDED_BY),
    )
    return Rows(columns, [replace(run, name=name) for run, name in zip(runs, names, strict=True)]).filled()


def comparison_charts(runs: Sequence[ComparedRun], names: Sequence[str]) -> tuple[Chart, ...]:
    """Return a chart for each measure, with one line per run that has the measure."""
    tables = _tables(runs)
    charts = (
        Chart(
            id=name,
            title=title,
            unit=f"{runs[0].unit}/s" if unit == "images/s" else unit,
            lines=tuple(
                Line(label=label, table=f"{i}.{table}", y=y, run=i, smooths=y in SMOOTHED)
                for i, label in enumerate(names)
            ),
            from_zero=from_zero,
        )
        for name, title, unit, table, y, from_zero in CHARTS
    )
    return drawn_charts(charts, tables)


def _tables(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    return {f"{i}.{name}": run.tables[name] for i, run in enumerate(runs) for name in ("steps", "epochs")}


def _html(
    runs: Sequence[ComparedRun], names: Sequence[str], out: Path, *, title: str, table: Rows, workers: Rows
) -> str:
    charts = comparison_charts(runs, names)
    return render_page(
        "comparison.html.j2",
        title=title,
        data=charts_data(charts, _tables(runs), (), rows_per_run(len(runs))),
        charts=charts,
        count=plural(len(runs), "run"),
        links=[_link(run.folder / REPORT, out) for run in runs],
        problems=[f"{name}: {problem}" for run, name in zip(runs, names, strict=True) for problem in run.problems],
        shared=_shared_settings(runs),
        words=[
            " ".join((name, run.name, *map("=".join, run.result.settings)))
            for run, name in zip(runs, names, strict=True)
        ],
        notes=f"{RULE}; {BASELINE_NOTE}",
        runs=table.cells,
        workers=workers.cells,
    )


def _shared_settings(runs: Sequence[ComparedRun]) -> list[tuple[str, str]]:
    """Return the settings that all runs share, without those at their defaults."""
    values_of_runs = [run.values for run in runs if run.values is not None]
    default = default_settings()
    first = values_of_runs[0] if values_of_runs else {}
    return [
        (key, describe_value(value))
        for key, value in first.items()
        if value != default.get(key) and all(run_values.get(key) == value for run_values in values_of_runs)
    ]


def _link(report: Path, out: Path) -> str:
    """Return the path of a run's report relative to this page; "" if there is none."""
    return Path(os.path.relpath(report, out.parent)).as_posix() if report.is_file() else ""
