"""The page of one run: one HTML file."""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from cputrain import __version__
from cputrain.affinity.terminal import printable_lines
from cputrain.affinity.topology.machine import format_list
from cputrain.affinity.views import plan_to_svg
from cputrain.affinity.wording import GIB, counted
from cputrain.files import REPORT, write_text
from cputrain.mpi.usage.records import HostUse, WorkerUse
from cputrain.recipe.schema import Recipe
from cputrain.report.charts import (
    FAINT,
    HIGH,
    LIMIT,
    LINE,
    LOW,
    Chart,
    Heat,
    Line,
    Table,
    charts_data,
    drawn,
    rows_per_run,
    table_of,
)
from cputrain.report.run import (
    LOOPBACK,
    Run,
    Usage,
    busy,
    faults_of,
    figures,
    host_rows,
    interfaces_of,
    mb_per_s,
    network_rows,
    particulars,
    read_run,
    running_time,
    status_text,
    unit_of,
    warnings_of,
    worker_rows,
)
from cputrain.runs.folder import describe_value, differences

PROGRAM = ("data.js", "chart.js", "heat.js", "page.js")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets:
    """The style and the program of every page; `script_hash` is the only script that the browser may run."""

    style: str
    script: str

    @property
    def script_hash(self) -> str:
        """The program's hash as a Content-Security-Policy has it."""
        return f"sha256-{base64.b64encode(hashlib.sha256(self.script.encode()).digest()).decode()}"


@cache
def read_assets() -> Assets:
    """The package's own files and uPlot, as one style and one script."""
    root = files("cputrain.report")
    program = "".join(root.joinpath("assets", name).read_text(encoding="utf-8") for name in PROGRAM)
    uplot = root.joinpath("vendor", "uplot")
    vendored = uplot.joinpath("uPlot.iife.min.js").read_text(encoding="utf-8")
    return Assets(
        style=uplot.joinpath("uPlot.min.css").read_text(encoding="utf-8")
        + root.joinpath("assets", "page.css").read_text(encoding="utf-8"),
        script=f'{vendored}\n(() => {{\n"use strict";\n{program}}})();\n',
    )


def render(template: str, *, title: str, data: Mapping[str, object], **values: Any) -> str:
    """A page. Texts in `values` are escaped by the template, those in `data` so that they cannot end its element."""
    environment = Environment(
        loader=PackageLoader("cputrain.report"),
        undefined=StrictUndefined,
        autoescape=True,
        finalize=lambda value: printable_lines(value) if type(value) is str else value,  # Markup is our own
        trim_blocks=False,
    )
    return environment.get_template(template).render(
        title=title,
        data=json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        assets=read_assets(),
        version=__version__,
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        **values,
    )


STEP_FIELDS = ("loss", "rate", "images_per_s")
EPOCH_FIELDS = ("train_loss", "val_loss", "train_top1", "val_top1", "val_top5", "images_per_s")


def training_tables(run: Run) -> dict[str, Table]:
    """The steps and the epochs, and the seconds of rank 0's steps by what they were spent on."""
    steps, at = run.with_times("step")
    table = table_of(steps, STEP_FIELDS, at)
    waits = {name: table_of(steps, (name,), at)[name] for name in ("data_wait_s", "comm_wait_s")}
    global_batch = run.start.get("global_batch") or np.nan
    with np.errstate(divide="ignore"):
        seconds = np.where(table["images_per_s"] > 0, global_batch / table["images_per_s"], np.nan)
    compute = np.maximum(seconds - np.nan_to_num(waits["data_wait_s"]) - np.nan_to_num(waits["comm_wait_s"]), 0)
    return {
        "steps": table,
        "epochs": table_of(*_epoch_rows(run)),
        "parts": {**{axis: table[axis] for axis in ("step", "epoch", "time")}, "compute_s": compute, **waits},
    }


def _epoch_rows(run: Run) -> tuple[list[dict[str, object]], tuple[str, ...], list[float]]:
    """The last event of each epoch (a run that stops within an epoch and resumes writes two), with their times."""
    events, times = run.with_times("epoch")
    last = {event["epoch"]: (event, at) for event, at in zip(events, times, strict=True)}
    return [event for event, _ in last.values()], EPOCH_FIELDS, [at for _, at in last.values()]


def training_charts(run: Run, tables: Mapping[str, Table]) -> tuple[Chart, ...]:
    """The charts of a training, without those that have no values."""
    unit = unit_of(run.start)

    def step(y: str, label: str = "each step") -> Line:
        return Line(label=label, table="steps", y=y, kind=FAINT, smooths=True)

    def epoch(y: str, label: str) -> Line:
        return Line(label=label, table="epochs", y=y)

    charts = (
        Chart(
            id="loss",
            title="Loss",
            unit="",
            lines=(step("loss"), epoch("train_loss", "training"), epoch("val_loss", "validation")),
        ),
        Chart(
            id="accuracy",
            title="Accuracy",
            unit="%",
            lines=(
                epoch("train_top1", "training top-1"),
                epoch("val_top1", "validation top-1"),
                epoch("val_top5", "validation top-5"),
            ),
        ),
        Chart(
            id="rate",
            title="Learning rate",
            unit="",
            lines=(Line(label="learning rate", table="steps", y="rate"),),
            from_zero=True,
        ),
        Chart(
            id="throughput",
            title="Throughput",
            unit=f"{unit}/s",
            lines=(step("images_per_s"), epoch("images_per_s", "mean of the epoch")),
            from_zero=True,
        ),
        Chart(
            id="parts",
            title="Time of rank 0's steps",
            unit="s",
            lines=tuple(
                Line(label=label, table="parts", y=y, smooths=True)
                for y, label in (
                    ("compute_s", "compute"),
                    ("comm_wait_s", "communication wait"),
                    ("data_wait_s", "data wait"),
                )
            ),
            from_zero=True,
        ),
    )
    return tuple(chart for each in charts if (chart := drawn(each, tables)) is not None)


MOST_LINES = 8  # with more, their mean and range
GRID = 400  # points of that mean
TIME = ("time",)

Curve = tuple[str, np.ndarray, np.ndarray, np.ndarray]  # label, when each value begins, when it ends, values


def usage_charts(usage: Usage) -> tuple[tuple[Chart, ...], dict[str, Table]]:
    """Busy CPUs and memory of each worker, network of each host, over the running time; and their tables."""
    clock = running_time(usage)
    tables: dict[str, Table] = {}

    def curve(label: str, records: Sequence[Any], value: Callable[[Any], float]) -> Curve:
        starts, ends = clock([r.time - r.seconds for r in records]), clock([r.time for r in records])
        return label, starts, ends, np.array([value(r) for r in records])

    def of_workers(value: Callable[[WorkerUse], float]) -> list[Curve]:
        return [curve(f"rank {rank}", records, value) for rank, records in usage.workers.items()]

    def chart(name: str, title: str, unit: str, *groups: tuple[str, list[Curve]], limits: dict[str, float]) -> Chart:
        lines = [line for what, curves in groups for line in _lines(f"{name}-{what}", what, curves, tables)]
        lines += [_level(f"{name}-{label}", label, value, lines, tables) for label, value in limits.items() if lines]
        return Chart(id=name, title=title, unit=unit, lines=tuple(lines), axes=TIME, from_zero=True)

    planned = list(usage.planned.values())
    cpus = {"planned CPUs": float(max(len(plan.pus) for plan in planned))} if planned else {}
    estimates = [plan.memory_bytes / GIB for plan in planned if plan.memory_bytes]
    alone = len(usage.hosts) == 1
    network = [
        (
            word,
            [
                curve(f"{host} {name} {word}", records, mb_per_s(name, direction))
                for host, records in usage.hosts.items()
                for name in _shown(records, alone=alone)
            ],
        )
        for direction, word in ((0, "received"), (1, "sent"))
    ]
    charts = (
        chart("cpu", "CPU per worker", "CPUs", ("workers", of_workers(busy)), limits=cpus),
        chart(
            "memory",
            "Memory per worker",
            "GiB",
            ("workers", of_workers(lambda r: r.rss_bytes / GIB)),
            limits={"estimated peak": max(estimates)} if estimates else {},
        ),
        chart("network", "Network per host", "MB/s", *network, limits={}),
    )
    return tuple(each for one in charts if (each := drawn(one, tables)) is not None), tables


def _shown(records: Sequence[HostUse], *, alone: bool) -> list[str]:
    """The busiest interface to other hosts; on a single host also the loopback, which its ranks communicate over."""
    names = interfaces_of(records)
    return [name for name in names if name != LOOPBACK][:1] + ([LOOPBACK] if alone and LOOPBACK in names else [])


def _lines(name: str, what: str, curves: Sequence[Curve], tables: dict[str, Table]) -> list[Line]:
    """A line for each curve, level from each value's begin to its end; of many curves their mean and range."""
    if len(curves) <= MOST_LINES:
        for i, (_, starts, ends, values) in enumerate(curves):
            tables[f"{name}-{i}"] = {"time": np.stack((starts, ends), axis=1).ravel(), "y": values.repeat(2)}
        return [Line(label=curve[0], table=f"{name}-{i}", y="y") for i, curve in enumerate(curves)]
    grid = np.linspace(0, max(ends[-1] for _, _, ends, _ in curves), GRID)
    found = np.ma.masked_invalid([_on_grid(grid, curve) for curve in curves])
    parts = {"mean": found.mean(axis=0), "lowest": found.min(axis=0), "highest": found.max(axis=0)}
    tables[name] = {"time": grid, **{part: np.ma.filled(values, np.nan) for part, values in parts.items()}}
    kinds = {"mean": LINE, "lowest": LOW, "highest": HIGH}
    return [Line(label=f"{len(curves)} {what}: {part}", table=name, y=part, kind=kinds[part]) for part in parts]


def _level(table: str, label: str, value: float, lines: Sequence[Line], tables: dict[str, Table]) -> Line:
    """A constant, from the first to the last time of these lines."""
    ends = [tables[line.table]["time"][index] for line in lines for index in (0, -1)]
    tables[table] = {"time": np.array([min(ends), max(ends)]), "y": np.full(2, value)}
    return Line(label=label, table=table, y="y", kind=LIMIT)


def _on_grid(grid: np.ndarray, curve: Curve) -> np.ndarray:
    """A curve's value at each point of the grid; NaN where it has none."""
    _, starts, ends, values = curve
    found = np.minimum(np.searchsorted(ends, grid), len(ends) - 1)
    known = (grid >= starts[0]) & (grid <= ends[-1])
    return np.where(known, values[found], np.nan)


COMPUTE, COMM, DATA = "compute", "communication wait", "data wait"
MOST_COLUMNS, MOST_ROWS = 400, 512  # of a heat map; with more, the largest value of each group is shown
MOST_BARS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """Mean seconds of a step on one rank, by what they were spent on."""

    rank: int
    compute_s: float
    comm_s: float
    data_s: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute_s + self.comm_s + self.data_s

    @property
    def percents(self) -> tuple[float, float, float]:
        """Compute, communication wait and data wait in percent of the step."""
        whole = self.seconds or 1.0
        return 100 * self.compute_s / whole, 100 * self.comm_s / whole, 100 * self.data_s / whole


def rank_times(run: Run) -> tuple[RankSeconds, ...]:
    """Each rank's mean step over the last start's records, without its first, in which caches are cold; of a run
    without such records rank 0's mean over its steps."""
    records = _of_last_start(run)
    if not records:
        return _rank_0(run)
    used = records[1:] or records
    steps = np.array([record["steps"] for record in used], dtype=float)
    mean = {
        name: np.average(np.array([record[name] for record in used]), axis=0, weights=steps) if steps.sum() else None
        for name in ("seconds", "comm_wait_s", "data_wait_s")
    }
    seconds, comm, data = (mean[name] for name in ("seconds", "comm_wait_s", "data_wait_s"))
    if seconds is None or comm is None or data is None:
        return ()
    return tuple(
        RankSeconds(rank=i, compute_s=max(float(whole - c - d), 0.0), comm_s=float(c), data_s=float(d))
        for i, (whole, c, d) in enumerate(zip(seconds, comm, data, strict=True))
    )


def _rank_0(run: Run) -> tuple[RankSeconds, ...]:
    steps, images = run.of("step"), run.start.get("global_batch")
    known = [step for step in steps[1:] or steps if step["images_per_s"] > 0]
    if not known or not images:
        return ()
    whole = float(np.mean([images / step["images_per_s"] for step in known]))
    comm = float(np.mean([step.get("comm_wait_s", 0.0) for step in known]))
    data = float(np.mean([step.get("data_wait_s", 0.0) for step in known]))
    return (RankSeconds(rank=0, compute_s=max(whole - comm - data, 0.0), comm_s=comm, data_s=data),)


def _of_last_start(run: Run) -> list[dict[str, Any]]:
    """The records since the number of ranks changed last."""
    records = run.of("ranks")
    count = len(records[-1]["seconds"]) if records else 0
    first = next((i + 1 for i in reversed(range(len(records))) if len(records[i]["seconds"]) != count), 0)
    return records[first:]


def shown_bars(times: Sequence[RankSeconds]) -> tuple[RankSeconds, ...]:
    """All ranks, or of many those that compute longest and shortest: they make the others wait, or wait for them."""
    if len(times) <= MOST_BARS:
        return tuple(times)
    by_compute = sorted(times, key=lambda each: -each.compute_s)
    return (*by_compute[: MOST_BARS // 2], *by_compute[-MOST_BARS // 2 :])


def time_heat(run: Run) -> Heat | None:
    """The seconds of a step by rank (rows) over the steps (columns); None without records of the ranks."""
    records = _of_last_start(run)
    if not records or not records[0]["seconds"]:
        return None
    table = {
        name: np.array([record[name] for record in records]).T for name in ("seconds", "comm_wait_s", "data_wait_s")
    }
    compute = np.maximum(table["seconds"] - table["comm_wait_s"] - table["data_wait_s"], 0.0)
    measures = {
        COMPUTE: compute,
        COMM: table["comm_wait_s"],
        DATA: table["data_wait_s"],
        "whole step": table["seconds"],
    }
    ranks = len(compute)
    groups = np.array_split(np.arange(ranks), min(ranks, MOST_ROWS))
    columns = np.array_split(np.arange(len(records)), min(len(records), MOST_COLUMNS))
    slowest = int(compute.mean(axis=1).argmax())
    return Heat(
        id="ranks",
        title="Seconds of a step, by rank",
        unit="s",
        rows=tuple(f"rank {g[0]}" if len(g) == 1 else f"ranks {g[0]} to {g[-1]}" for g in groups),
        at=tuple(records[c[-1]]["step"] for c in columns),
        measures={name: _largest(values, groups, columns) for name, values in measures.items()},
        words=(
            f"{ranks} ranks over {len(records)} records, the last at step {records[-1]['step']:,}; rank {slowest} "
            f"computes longest, {compute[slowest].mean():.4g} s a step on average (all: {compute.mean():.4g} s)"
        ),
    )


def _largest(values: np.ndarray, rows: Sequence[np.ndarray], columns: Sequence[np.ndarray]) -> np.ndarray:
    """The largest value of each group of rows and columns."""
    by_row = np.stack([values[group].max(axis=0) for group in rows])
    return np.stack([by_row[:, group].max(axis=1) for group in columns], axis=1)


def trust_heat(run: Run) -> Heat | None:
    """The trust ratios, or without LARS the ratios of weight and gradient norms, of each layer over the steps; None
    without records of them."""
    records = run.of("ratios")
    layers = [layer["layer"] for layer in records[-1]["layers"]] if records else []
    if not layers:
        return None
    by_layer = [{layer["layer"]: layer for layer in record["layers"]} for record in records]
    has_trust = any(layer.get("trust") is not None for layer in records[-1]["layers"])
    names = {
        "trust ratio": "trust",
        "weights / gradients": "ratio",
        "weight norm": "weights",
        "gradient norm": "gradients",
    }
    measures = {
        name: np.array([[_number(found.get(layer, {}).get(key)) for found in by_layer] for layer in layers])
        for name, key in names.items()
        if key != "trust" or has_trust
    }
    columns = np.array_split(np.arange(len(records)), min(len(records), MOST_COLUMNS))
    singles = [np.array([i]) for i in range(len(layers))]
    first = next(iter(measures.values()))[:, -1]
    known = np.where(np.isnan(first), -np.inf, first)
    title = "Trust ratios" if has_trust else "Norms of weights and gradients"
    return Heat(
        id="trust",
        title=f"{title}, by layer",
        unit="",
        rows=tuple(layers),
        at=tuple(records[c[-1]]["step"] for c in columns),
        measures={name: _largest(values, singles, columns) for name, values in measures.items()},
        words=(
            f"{len(layers)} layers over {len(records)} records; at the last one {next(iter(measures))} is highest in "
            f"{layers[int(known.argmax())]} ({known.max():.4g})"
        ),
        log=True,
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else np.nan


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
