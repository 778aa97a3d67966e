"""Predictions as text, JSON and charts, and the one-line prediction of a planned job."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import MIB, plural
from cputrain.predict.assumptions import published_runs
from cputrain.predict.layers import NOT_MEASURED
from cputrain.predict.step_time import Setup, Step
from cputrain.rows import Column, Rows
from cputrain.studies.simulate.predict import (
    Candidate,
    Row,
    Scenario,
    check_global_batch,
    images_per_s_of,
    layers_of,
    no_prediction,
    rows_of,
)
from cputrain.studies.simulate.setup import reuse_slowness
from cputrain.studies.svg import figure_svg, plot_svg, subplots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINT = ("nodes", "workers", "images_per_s", "efficiency", "step_s", "exposed_comm_s", "time_to_train_s")
MINUTE, HOUR = 60, 3600
SETUP = ("workers", "threads", "comm_cores", "loader_cores", "local_batch", "global_batch", "algorithm")
MS = 1e3
WORTHWHILE = 0.5  # fraction of a host's own speed that one more host should add


def rough_duration(seconds: float) -> str:
    """Format seconds of an estimate as "35 s", "12.4 min", "3.2 h" or "4.1 days"."""
    if seconds < 2 * MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 3 * HOUR:
        return f"{seconds / MINUTE:.1f} min"
    return f"{seconds / HOUR:.1f} h" if seconds < 48 * HOUR else f"{seconds / 24 / HOUR:.1f} days"


COLUMNS = (
    Column("nodes", "nodes", ","),
    Column("workers", "workers", ","),
    Column("img/s", "images_per_s", lambda rate: f"{rate:,.4g}" if rate < 1000 else f"{rate:,.0f}"),
    Column("range", lambda row: f"{row.low:,.0f}-{row.high:,.0f}"),
    Column("efficiency", lambda row: 100 * row.efficiency, "{:.0f} %".format),
    Column("step", "step_s", "{:.3f} s".format),
    Column("exposed", lambda row: 1e3 * row.exposed_s, "{:.0f} ms".format),
    Column("stragglers", lambda row: 1e3 * row.straggler_s, "{:.0f} ms".format),
    Column("time to train", "time_to_train_s", rough_duration, empty="-"),
    Column("node-hours", "node_hours", ",.1f", empty="-"),
    Column("kWh", "energy_kwh", ",.1f", empty="-"),
)


def rows_text(rows: Sequence[Row]) -> str:
    """Format the table of a prediction, with node-hours, and with energy if watts are known."""
    table = Rows(COLUMNS, rows)
    return (table if any(row.energy_kwh is not None for row in rows) else table.without("kWh")).text()


def candidates_text(candidates: Sequence[Candidate]) -> str:
    """Format the plans of a search, the recipe's first and the best last; two columns compare with these two."""
    first, best = candidates[0].time_to_train_s, candidates[-1].time_to_train_s
    columns = (
        Column("plan", "name"),
        Column("workers x threads", lambda candidate: f"{candidate.setup.workers} x {candidate.setup.threads}"),
        Column(
            "comm + loader cores", lambda candidate: f"{candidate.setup.comm_cores} + {candidate.setup.loader_cores}"
        ),
        Column("local", "setup.local_batch"),
        Column("global batch", "setup.global_batch", ","),
        Column("all-reduce", "setup.algorithm"),
        Column("img/s", "images_per_s", ",.0f"),
        Column("time to train", "time_to_train_s", rough_duration),
        Column("speed-up", lambda candidate: first / candidate.time_to_train_s, ".2f"),
        Column("longer than best", lambda candidate: 100 * (candidate.time_to_train_s / best - 1), "{:+.1f} %".format),
    )
    return Rows(columns, candidates).text(numbers=False)


def candidates_json(scenario: Scenario, candidates: Sequence[Candidate]) -> str:
    """Return {"plans": [...], "assumptions": [...]}: the plans of a search, the recipe's first and the best last."""
    setups = tuple(Column(name, f"setup.{name}") for name in SETUP)
    speeds = tuple(Column(name, name) for name in ("images_per_s", "time_to_train_s"))
    plans = Rows((Column("name", "name"), *setups, *speeds), candidates).json()
    return json.dumps({"plans": plans, "assumptions": assumption_values(scenario)}, indent=1)


def rows_json(scenario: Scenario, rows: Sequence[Row]) -> str:
    """Return {"rows": [...], "points": [...], "assumptions": [{"name", "value", "source", ...}]}, times in seconds.

    A point has the values that charts show, with exposed communication as "exposed_comm_s".
    """
    points = Rows(tuple(Column(name, name.replace("exposed_comm_s", "exposed_s")) for name in POINT), rows).json()
    values = {"rows": list(map(asdict, rows)), "points": points, "assumptions": assumption_values(scenario)}
    return json.dumps(values, indent=1)


def assumption_values(scenario: Scenario) -> list[dict[str, Any]]:
    """Return the rate, the link and every constant with name, value, range and source."""
    reference, link = scenario.reference, scenario.link
    setup = reference.setup
    layers = reuse_slowness(layers_of(scenario.recipe.model, scenario.recipe.data), reference.setup.layers)
    measured = sum(layer.slowness != NOT_MEASURED for layer in layers)
    workers = f"{setup.hosts} x {plural(setup.workers, 'worker')} with {plural(setup.local_batch, 'image')}"
    note = f"of {len(layers)}; the time of the others follows from their operations and bytes and the images/s"
    fabric = f"{link.name}: {link.source}"

    def known(name: str, value: float, source: str, bounds: tuple[float, ...] = ()) -> dict[str, Any]:
        return {"name": name, "value": value, **dict(zip(("low", "high"), bounds, strict=False)), "source": source}

    return [
        known(
            "reference_images_per_s", reference.images_per_s, f"{workers} each: {reference.source}", reference.bounds
        ),
        known("measured_layers", measured, note),
        known("link_bytes_per_s", link.bytes_per_s, fabric),
        known("link_latency_s", link.latency_s, fabric, link.latency_range_s),
        known("link_taper", link.taper, fabric),
        *map(asdict, scenario.assumptions),
    ]


def assumptions_text(scenario: Scenario) -> str:
    """Format every assumption with its range and source."""
    lines = []
    for item in assumption_values(scenario):
        span = f" ({item['low']:.4g} to {item['high']:.4g})" if "low" in item else ""
        lines.append(f"  {item['name']} {item['value']:.4g}{span}: {item['source']}")
    return "\n".join(lines)


def scaling_svg(scenario: Scenario, rows: Sequence[Row]) -> str:
    """Draw images/s over hosts with its range, the ideal line, and published runs of this processor and network."""
    nodes = [row.nodes for row in rows]
    published = [
        run
        for run in published_runs()
        if run.processor in scenario.machine.model
        and run.network == scenario.recipe.model.name
        and run.precision == scenario.recipe.precision
    ]

    def draw(axes: "Axes") -> None:
        ideal = [row.images_per_s / row.efficiency for row in rows]
        lows, highs = [max(row.low, 0.0) for row in rows], [row.high for row in rows]
        axes.plot(nodes, ideal, "--", color="0.5", label="ideal: as many single hosts")
        axes.plot(nodes, [row.images_per_s for row in rows], "o-", color="C0", label="predicted")
        axes.fill_between(nodes, lows, highs, color="C0", alpha=0.2, label="range")
        for number, family in enumerate(dict.fromkeys(run.family for run in published)):
            points = [(run.hosts, run.images_per_s) for run in published if run.family == family]
            mark, color = "sDv^"[number % 4], f"C{number + 1}"
            axes.plot(*zip(*points, strict=True), mark, color=color, label=f"published: {family}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(nodes, [f"{count:,}" for count in nodes])
        axes.minorticks_off()

    title = f"{scenario.recipe.name} on {scenario.machine.name}, {scenario.link.name}"
    return plot_svg(draw, (7.5, 5), xlabel="hosts", ylabel="images/s", title=title)


def timeline_svg(scenario: Scenario, setup: Setup, step: Step) -> str:
    """Draw a step of the slowest worker: compute above, all-reduces below, one bar per layer and per bucket."""
    figure, axes = subplots(figsize=(11, 2.8))

    def bars(row: float, color: str, label: str, *spans: tuple[float, float], line: float | None = None) -> None:
        intervals = [(MS * begin, MS * (end - begin)) for begin, end in spans]
        edges = {} if line is None else {"edgecolor": "white", "linewidth": line}
        axes.broken_barh(intervals, (row, 0.8), color=color, label=label, **edges)

    updated = step.step_s - step.optimizer_s
    bars(1.1, "C0", "forward", (0.0, step.forward_end_s))
    bars(1.1, "C1", "backward", *pairwise((step.forward_end_s, *step.layer_ends_s)), line=0.2)
    bars(1.1, "0.85", "waiting", (step.backward_end_s, max(updated, step.backward_end_s)))
    bars(1.1, "C2", "optimizer", (updated, step.step_s))
    if step.buckets:
        sizes = [bucket.size / MIB for bucket in step.buckets]
        label = f"all-reduce: {len(sizes)} buckets of {min(sizes):.1f}-{max(sizes):.1f} MiB"
        bars(0.1, "C3", label, *((bucket.start_s, bucket.end_s) for bucket in step.buckets), line=0.4)
    axes.set_yticks([0.5, 1.5], ["network", "cores"])
    axes.set(
        xlim=(0, MS * step.step_s),
        xlabel="ms",
        title=f"{scenario.recipe.name}: a step on {setup.hosts} x {plural(setup.workers, 'worker')}, "
        f"{plural(setup.local_batch, 'image')} each",
    )
    axes.legend(fontsize="small", ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    return figure_svg(figure)


def predicted(scenario: Scenario, hosts: int) -> list[str]:
    """Predict images/s, efficiency and time to train of a job of several hosts, and warn if one more host would add
    less than half of its own speed. Without a prediction, return the reason."""
    try:
        check_global_batch(scenario, (hosts,))  # a training may divide it unequally; a prediction assumes equal workers
        (row,) = rows_of(scenario, (hosts,))
        single, more = (images_per_s_of(scenario, count) for count in (1, hosts + 1))
    except InputError as error:  # what is compared does not fit
        return [no_prediction(error)]
    lines = [_line(row, scenario.recipe.epochs)]
    if single is not None and more is not None and more - row.images_per_s < WORTHWHILE * single:
        gained = max(0.0, (more - row.images_per_s) / single)
        lines.append(f"warning: one more host would add {100 * gained:.0f} % of its speed; see `cputrain simulate`")
    return lines


def _line(row: Row, epochs: int) -> str:
    took = row.time_to_train_s
    time = "" if took is None else f"; {plural(epochs, 'epoch')} in {rough_duration(took)}"
    return (
        f"predicted: {row.images_per_s:,.0f} images/s ({row.low:,.0f} to {row.high:,.0f}), "
        f"{100 * row.efficiency:.0f} % of {plural(row.nodes, 'single host')}{time} (cputrain simulate)"
    )
