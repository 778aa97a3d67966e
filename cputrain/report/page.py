"""A run's folder -> report.html, self-contained."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from affinity.topology.cpuset import format_list
from affinity.views.svg import plan_to_svg
from affinity.wording import counted
from cputrain.files import write_text
from cputrain.recipe.schema import Recipe
from cputrain.report.charts import Chart, Heat, charts_data
from cputrain.report.history import faults_of, warnings_of
from cputrain.report.html import render
from cputrain.report.run import Run, read_run, unit_of
from cputrain.report.step_times import COMM, COMPUTE, DATA, rank_times, shown_bars, time_heat, trust_heat
from cputrain.report.summary import figures, particulars, status_text
from cputrain.report.tables import Table, rows_per_run
from cputrain.report.training_charts import training_charts, training_tables
from cputrain.report.usage import Usage, host_rows, network_rows, worker_rows
from cputrain.report.usage_charts import usage_charts
from cputrain.runs.folder import REPORT
from cputrain.runs.resume import describe_value, differences

MOST_EPOCHS = 200  # rows of the table
MOST_PICTURES = 8
EPOCH_CELLS = (
    ("train_loss", ".4f"),
    ("train_top1", ".2f"),
    ("val_loss", ".4f"),
    ("val_top1", ".2f"),
    ("val_top5", ".2f"),
    ("seconds", ".1f"),
    ("images_per_s", ",.1f"),
)


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a training, finished or not, or of the resource use of a launched command, to `out` or the
    folder's report.html.

    Raises InputError where the folder contains neither.
    """
    path = out or folder / REPORT
    write_text(path, report_html(read_run(folder)))
    return path


def report_html(run: Run) -> str:
    """The page about a run."""
    tables: dict[str, Table] = training_tables(run) if run.events else {}
    curves = training_charts(run, tables) if tables else ()
    heats = tuple(heat for heat in (time_heat(run), trust_heat(run)) if heat is not None)
    use = _use(run.usage, tables) if run.usage else None
    status = run.status() if run.trained else ""
    times = rank_times(run)
    return render(
        "run.html.j2",
        title=run.name,
        data=_data(curves, use, tables, heats),
        run=run,
        status=status,
        status_text=status_text(run, status) if status else "",
        figures=figures(run),
        particulars=particulars(run),
        warnings=warnings_of(run),
        faults=faults_of(run),
        curves=curves,
        thinned=_thinned(tables),
        bars=shown_bars(times),
        shares=_shares([each.percents for each in times]),
        ranks=len(times),
        heats=heats,
        use=use,
        unit=unit_of(run.start),
        **_epochs(run),
        changed=_changed(run.recipe),
        pictures=[(hosts, plan_to_svg(plan)) for hosts, plan in run.plans[:MOST_PICTURES]],
        **_bindings(run),
    )


def _data(
    curves: Sequence[Chart], use: dict[str, Any] | None, tables: dict[str, Table], heats: Sequence[Heat]
) -> dict[str, object]:
    charts = (*curves, *(use["charts"] if use else ()))
    used = {line.table for chart in charts for line in chart.lines}
    return charts_data(charts, {name: tables[name] for name in tables if name in used}, heats, rows_per_run(1))


def _thinned(tables: dict[str, Table]) -> str:
    steps, most = len(tables["steps"]["step"]) if "steps" in tables else 0, rows_per_run(1)
    return f"{counted(steps, 'step')}: each interval is drawn by its minimum and maximum." if steps > most else ""


def _shares(percents: Sequence[tuple[float, float, float]]) -> list[tuple[str, float]]:
    """The mean share of each part of a step, over the ranks."""
    if not percents:
        return []
    return list(zip((COMPUTE, COMM, DATA), map(float, np.mean(percents, axis=0)), strict=True))


def _use(usage: Usage, tables: dict[str, Table]) -> dict[str, Any]:
    """The page's values about resource use; its tables are added to `tables`."""
    charts, more = usage_charts(usage)
    tables.update(more)
    return {
        "charts": charts,
        "workers": worker_rows(usage),
        "hosts": host_rows(usage),
        "network": network_rows(usage),
    }


def _epochs(run: Run) -> dict[str, Any]:
    """The table of epochs; of very many, evenly spaced ones."""
    last = list({event["epoch"]: event for event in run.of("epoch")}.values())
    places = np.unique(np.linspace(0, len(last) - 1, min(len(last), MOST_EPOCHS)).round().astype(int))
    shown = [last[i] for i in places]
    rows = [
        (
            f"{event['epoch']:g}",
            *("" if event[key] is None else format(event[key], spec) for key, spec in EPOCH_CELLS),
        )
        for event in shown
    ]
    of = f"{len(shown)} of {len(last):,} epochs" if len(shown) < len(last) else counted(len(last), "epoch")
    return {"epochs": rows, "epochs_of": of}


def _changed(recipe: Recipe | None) -> list[tuple[str, str, str]]:
    """The recipe's keys that have another value than the default: key, value, default."""
    if recipe is None:
        return []
    found = differences(Recipe(), recipe)
    return [(key, describe_value(new), describe_value(old)) for key, (old, new) in found.items()]


def _bindings(run: Run) -> dict[str, Any]:
    """The table of bindings, and whether they are as planned."""
    bindings = run.start.get("bindings", [])
    misplaced = [each for each in bindings if each["pus"] != each["planned_pus"]]
    ranks = ", ".join(str(each["rank"]) for each in misplaced[:8]) + (", ..." if len(misplaced) > 8 else "")
    return {
        "bindings": [
            (
                str(each["rank"]),
                each["host"],
                format_list(each["planned_pus"]),
                format_list(each["pus"]),
                each["memory_policy"],
                " ".join(format_list(pus) for pus in each.get("thread_pus", ())),
            )
            for each in bindings
        ],
        "misplaced": misplaced,
        "bound": f"Not where planned: rank {ranks}"
        if misplaced
        else f"The kernel has put {counted(len(bindings), 'rank')} where the plan wants them.",
    }
