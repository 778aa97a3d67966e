"""Predictions as text and JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cputrain.affinity.terminal import align_columns
from cputrain.simulate.predict import Scenario, scenario_setup
from cputrain.simulate.scaling import Candidate, Row
from cputrain.simulate.step import NOT_MEASURED

HEAD = ("nodes", "workers", "img/s", "range", "efficiency", "step", "exposed", "stragglers", "time to train")
KEYS = ("nodes", "workers", "images_per_s", "low", "high", "efficiency", "step_s", "exposed_s", "time_to_train_s")
MORE_KEYS = ("straggler_s", "global_batch", "node_hours", "energy_kwh")
POINT = ("nodes", "workers", "images_per_s", "efficiency", "step_s", "exposed_comm_s", "time_to_train_s")
POINT_KEYS = {"exposed_comm_s": "exposed_s"}
MINUTE, HOUR = 60, 3600


def rows_text(rows: Sequence[Row]) -> str:
    """The table of a prediction, with node-hours, and with energy where watts are known."""
    energy = any(row.energy_kwh is not None for row in rows)
    head = (*HEAD, "node-hours", *(("kWh",) if energy else ()))
    return align_columns([head, *(_cells(row, energy=energy) for row in rows)], numbers=True)


def _cells(row: Row, *, energy: bool) -> tuple[str, ...]:
    hours = "-" if row.node_hours is None else f"{row.node_hours:,.1f}"
    kwh = "-" if row.energy_kwh is None else f"{row.energy_kwh:,.1f}"
    return (
        f"{row.nodes:,}",
        f"{row.workers:,}",
        f"{row.images_per_s:,.4g}" if row.images_per_s < 1000 else f"{row.images_per_s:,.0f}",
        f"{row.low:,.0f}-{row.high:,.0f}",
        f"{100 * row.efficiency:.0f} %",
        f"{row.step_s:.3f} s",
        f"{1e3 * row.exposed_s:.0f} ms",
        f"{1e3 * row.straggler_s:.0f} ms",
        "-" if row.time_to_train_s is None else rough_duration(row.time_to_train_s),
        hours,
        *((kwh,) if energy else ()),
    )


def rough_duration(seconds: float) -> str:
    """Seconds of an estimate as "35 s", "12.4 min", "3.2 h" or "4.1 days"."""
    if seconds < 2 * MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 3 * HOUR:
        return f"{seconds / MINUTE:.1f} min"
    return f"{seconds / HOUR:.1f} h" if seconds < 48 * HOUR else f"{seconds / 24 / HOUR:.1f} days"


def candidates_text(candidates: Sequence[Candidate]) -> str:
    """The plans of a search, the recipe's own first and the best last; the last columns compare them with both."""
    first, best = candidates[0].time_to_train_s, candidates[-1].time_to_train_s
    cells = [
        (
            each.name,
            f"{each.setup.workers} x {each.setup.threads}",
            f"{each.setup.comm_cores} + {each.setup.loader_cores}",
            f"{each.setup.local_batch}",
            f"{each.setup.global_batch:,}",
            each.setup.algorithm,
            f"{each.images_per_s:,.0f}",
            rough_duration(each.time_to_train_s),
            f"{first / each.time_to_train_s:.2f}",
            f"{100 * (each.time_to_train_s / best - 1):+.1f} %",
        )
        for each in candidates
    ]
    head = ("plan", "workers x threads", "comm + loader cores", "local", "global batch", "all-reduce", "img/s")
    return align_columns([(*head, "time to train", "speed-up", "longer than best"), *cells])


def candidates_json(scenario: Scenario, candidates: Sequence[Candidate]) -> str:
    """{"plans": [...], "assumptions": [...]}: the plans of a search, the recipe's own first and the best last."""
    plans = [
        {
            "name": each.name,
            "workers": each.setup.workers,
            "threads": each.setup.threads,
            "comm_cores": each.setup.comm_cores,
            "loader_cores": each.setup.loader_cores,
            "local_batch": each.setup.local_batch,
            "global_batch": each.setup.global_batch,
            "algorithm": each.setup.algorithm,
            "images_per_s": each.images_per_s,
            "time_to_train_s": each.time_to_train_s,
        }
        for each in candidates
    ]
    return json.dumps({"plans": plans, "assumptions": assumption_values(scenario)}, indent=1)


def rows_json(scenario: Scenario, rows: Sequence[Row]) -> str:
    """{"rows": [...], "points": [...], "assumptions": [{"name", "value", "source", ...}]}, times in seconds.

    A point has what curves are drawn of, and calls exposed communication "exposed_comm_s".
    """
    kept = [{key: values[key] for key in (*KEYS, *MORE_KEYS)} for values in map(asdict, rows)]
    points = [{key: values[POINT_KEYS.get(key, key)] for key in POINT} for values in kept]
    return json.dumps({"rows": kept, "points": points, "assumptions": assumption_values(scenario)}, indent=1)


def assumption_values(scenario: Scenario) -> list[dict[str, Any]]:
    """The rate, the link and every constant: name, value, range, source."""
    reference, link = scenario.reference, scenario.link
    setup = reference.setup
    layers = scenario_setup(scenario, 1).layers
    measured = sum(layer.slowness != NOT_MEASURED for layer in layers)
    workers = f"{setup.hosts} x {setup.workers} workers with {setup.local_batch} images"
    known: list[dict[str, Any]] = [
        {
            "name": "reference_images_per_s",
            "value": reference.images_per_s,
            "low": reference.bounds[0],
            "high": reference.bounds[1],
            "source": f"{workers} each: {reference.source}",
        },
        {
            "name": "measured_layers",
            "value": measured,
            "source": f"of {len(layers)}; the time of others follows from their operations and bytes and the images/s",
        },
        {"name": "link_bytes_per_s", "value": link.bytes_per_s, "source": f"{link.name}: {link.source}"},
        {
            "name": "link_latency_s",
            "value": link.latency_s,
            "low": link.latency_range_s[0],
            "high": link.latency_range_s[1],
            "source": f"{link.name}: {link.source}",
        },
        {"name": "link_taper", "value": link.taper, "source": f"{link.name}: {link.source}"},
    ]
    return known + [asdict(assumption) for assumption in scenario.assumptions]


def assumptions_text(scenario: Scenario) -> str:
    """Every assumption with its range and source."""
    lines = []
    for item in assumption_values(scenario):
        span = f" ({item['low']:.4g} to {item['high']:.4g})" if "low" in item else ""
        lines.append(f"  {item['name']} {item['value']:.4g}{span}: {item['source']}")
    return "\n".join(lines)
