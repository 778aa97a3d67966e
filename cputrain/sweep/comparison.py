"""Runs compared on one page: overlaid curves, their table, the study of worker counts; the same as Markdown and CSV."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from affinity.text_table import csv_table, markdown_table
from affinity.wording import counted
from cputrain.files import write_text
from cputrain.recipe.schema import Recipe
from cputrain.report.charts import Chart, Line, charts_data, drawn
from cputrain.report.html import render
from cputrain.report.tables import rows_per_run
from cputrain.runs.folder import REPORT
from cputrain.runs.resume import describe_value, values_by_key
from cputrain.sweep.compared_runs import ComparedRun, compare_runs
from cputrain.sweep.tables import COLUMNS, ENDED_BY, FOLDER
from cputrain.sweep.variants import label_of
from cputrain.sweep.workers import FEWEST, RULE, compare, comparison_rows

SHARES = ("compute %", "communication wait %", "data wait %")
SMOOTHED = ("loss", "images_per_s")  # of single steps
CHARTS = (
    ("top1", "Validation top-1", "%", "epochs", "val_top1", False),
    ("loss", "Training loss", "", "steps", "loss", False),
    ("val-loss", "Validation loss", "", "epochs", "val_loss", False),
    ("train-top1", "Training top-1", "%", "epochs", "train_top1", False),
    ("throughput", "Throughput", "images/s", "steps", "images_per_s", True),
    ("rate", "Learning rate", "", "steps", "rate", True),
)


def write_comparison(folders: Sequence[Path], out: Path, title: str) -> tuple[Path, Path, Path]:
    """Write the page to `out`, and beside it the tables as .md and .csv; returns their paths. Raises InputError."""
    runs = compare_runs(folders, rows_per_run(len(folders)))
    names = names_of(runs)
    heads, rows = result_table(runs, names)
    worker_rows = comparison_rows(compare([run.result for run in runs]))
    paths = out, out.with_suffix(".md"), out.with_suffix(".csv")
    html = _html(runs, names, out, title=title, heads=heads, rows=rows, workers=worker_rows)
    study = f"\n## Workers\n\n{markdown_table(worker_rows)}\n{RULE}; {FEWEST}\n" if len(worker_rows) > 1 else ""
    for path, text in zip(
        paths, (html, f"# {title}\n\n{markdown_table([heads, *rows])}{study}", csv_table([heads, *rows])), strict=True
    ):
        write_text(path, text)
    return paths


def names_of(runs: Sequence[ComparedRun]) -> tuple[str, ...]:
    """What tells each run from the others: the settings in which it differs, or else its folder."""
    labels = [label_of(run.result.settings, without=()) for run in runs]
    unique = all(labels) and len(set(labels)) == len(labels) and max(map(len, labels)) <= 60
    folders = [run.name for run in runs]
    if unique:
        return tuple(labels)
    return tuple(folders if len(set(folders)) == len(folders) else (str(run.folder) for run in runs))


def result_table(runs: Sequence[ComparedRun], names: Sequence[str]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and a row for each run: its name, its results, the settings in which the runs differ; without empty
    columns."""
    keys = tuple(dict.fromkeys(key for run in runs for key, _ in run.result.settings))
    columns = [column for column in COLUMNS if not column.requested and column.head != FOLDER]
    heads = ("run", "workers", "global batch", *(column.head for column in columns), *SHARES, *keys)
    rows = []
    for run, name in zip(runs, names, strict=True):
        settings, result = dict(run.result.settings), run.result
        values = [column.value(result) for column in columns]
        rows.append(
            (
                name,
                *(f"{size:,}" if size else "" for size in (result.setup.workers, result.setup.global_batch)),
                *("" if v is None else column.text(v) for column, v in zip(columns, values, strict=True)),
                *(f"{share:.1f}" for share in run.shares or ()),
                *("" for _ in SHARES[len(run.shares) :]),
                *(settings.get(key, "") for key in keys),
            )
        )
    filled = [i for i in range(len(heads)) if i == 0 or any(row[i] for row in rows)]
    ended = heads.index(ENDED_BY)
    order = [i for i in filled if i != ended] + [i for i in filled if i == ended]
    return tuple(heads[i] for i in order), [tuple(row[i] for i in order) for row in rows]


def comparison_charts(runs: Sequence[ComparedRun], names: Sequence[str]) -> tuple[Chart, ...]:
    """A chart for each measure, with a line for each run that has it."""
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
    return tuple(chart for each in charts if (chart := drawn(each, tables)) is not None)


def _tables(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    return {f"{i}.{name}": run.tables[name] for i, run in enumerate(runs) for name in ("steps", "epochs")}


def _html(runs: Sequence[ComparedRun], names: Sequence[str], out: Path, *, title: str, **tables: Any) -> str:
    charts = comparison_charts(runs, names)
    shared = _shared_settings(runs)
    return render(
        "comparison.html.j2",
        title=title,
        data=charts_data(charts, _tables(runs), (), rows_per_run(len(runs))),
        charts=charts,
        count=counted(len(runs), "run"),
        links=[_link(run.folder / REPORT, out) for run in runs],
        problems=[f"{name}: {problem}" for run, name in zip(runs, names, strict=True) for problem in run.problems],
        shared=shared,
        words=[
            " ".join((name, run.name, *map("=".join, run.result.settings)))
            for run, name in zip(runs, names, strict=True)
        ],
        notes=f"{RULE}; {FEWEST}",
        **tables,
    )


def _shared_settings(runs: Sequence[ComparedRun]) -> list[tuple[str, str]]:
    """The keys that all runs share and that are not at their defaults."""
    known = [run.values for run in runs if run.values is not None]
    default = values_by_key(Recipe())
    first = known[0] if known else {}
    return [
        (key, describe_value(value))
        for key, value in first.items()
        if value != default.get(key) and all(each.get(key) == value for each in known)
    ]


def _link(report: Path, out: Path) -> str:
    """A run's own page relative to this one; "" where there is none."""
    return Path(os.path.relpath(report, out.parent)).as_posix() if report.is_file() else ""
