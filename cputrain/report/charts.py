"""Charts, heat maps and their tables: the types that pages draw, and the charts of one run."""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cputrain.affinity.wording import GIB, plural
from cputrain.mpi.usage import HostUse, WorkerUse
from cputrain.report.run import LOOPBACK, Run, Usage, busy_cpus, interfaces_of, mb_per_s, running_time, unit_of

Table = Mapping[str, np.ndarray]
"""Columns of equal length, float64; NaN for missing values. Columns named in AXES never decrease."""

AXES = ("step", "epoch", "time")
MAX_ROWS = 160_000  # of all runs on a page: at 50 bytes per row, a browser draws them at once
MIN_ROWS = 400  # per run, however many runs there are

LINE, FAINT, LOW, HIGH, LIMIT = "line", "faint", "low", "high", "limit"
"""Kinds of lines: faint for single steps behind their means, low and high for a range, limit is dashed."""

COMPUTE, COMM, DATA = "compute", "communication wait", "data wait"  # the parts of a step
STEP_FIELDS = ("loss", "rate", "images_per_s")
EPOCH_FIELDS = ("train_loss", "val_loss", "train_top1", "val_top1", "val_top5", "images_per_s")

MAX_LINES = 8  # if there are more, their mean and range are drawn
GRID = 400  # points of the mean
TIME = ("time",)

Curve = tuple[str, np.ndarray, np.ndarray, np.ndarray]  # label, start and end of each value's interval, values

MAX_HEAT_COLUMNS, MAX_HEAT_ROWS = 400, 512  # of a heat map; if there are more, the maximum of each group is shown
MAX_BARS = 32


def as_column(values: Iterable[Any]) -> np.ndarray:
    """Return numbers as a column, with NaN for None."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def table_of_events(
    events: Sequence[Mapping[str, Any]], names: Sequence[str], times: Sequence[float]
) -> dict[str, np.ndarray]:
    """Return the fields of events as columns, with times in seconds since the run's first event."""
    columns = {name: as_column(event.get(name) for event in events) for name in ("step", "epoch", *names)}
    return {**columns, "time": as_column(times)}


def rows_per_run(runs: int) -> int:
    """Return the largest number of rows of one run's table on a page with `runs` runs."""
    return max(MAX_ROWS // max(runs, 1), MIN_ROWS)


def thin_table(table: Table, limit: int) -> Table:
    """Thin a table to about `limit` rows: from equal intervals, keep the rows with the lowest and the highest value of
    each column, and the first and the last row."""
    rows = len(next(iter(table.values()), ()))
    values = [values_of_column for name, values_of_column in table.items() if name not in AXES]
    if rows <= limit or not values:
        return table
    stretches = max((limit - 2) // (2 * len(values)), 1)
    size = -(-rows // stretches)
    rows_kept = {0, rows - 1}
    for column_values in values:
        padded = np.full(size * -(-rows // size), np.nan)
        padded[:rows] = column_values
        parts = padded.reshape(-1, size)
        firsts = np.arange(len(parts)) * size
        present = ~np.isnan(parts).all(axis=1)
        for extreme in (
            np.where(np.isnan(parts), np.inf, parts).argmin(1),
            np.where(np.isnan(parts), -np.inf, parts).argmax(1),
        ):
            rows_kept.update((firsts + extreme)[present].tolist())
    index = np.array(sorted(rows_kept))
    return {name: values_of_column[index] for name, values_of_column in table.items()}


def packed(values: np.ndarray) -> str:
    """Encode numbers as base64 of little-endian float32, a quarter of the size of their digits."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve: column `y` of a table over one of AXES. `run` is the number of its run on a page with several; `smooths`
    if the reader can smooth it."""

    label: str
    table: str
    y: str
    kind: str = LINE
    run: int | None = None
    smooths: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines with a common unit. `words` describes them as text; `axes` are the x axes to choose from."""

    id: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    words: str = ""
    axes: tuple[str, ...] = AXES
    from_zero: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """A heat map: one array (rows, columns) per measure; `at` labels the columns with steps, or with the quantity named
    by `across`."""

    id: str
    title: str
    unit: str
    rows: tuple[str, ...]
    at: tuple[int, ...] | tuple[str, ...]
    measures: Mapping[str, np.ndarray]
    words: str
    log: bool = False
    across: str = "step"


def charts_data(
    charts: Sequence[Chart], tables: Mapping[str, Table], heats: Sequence[Heat], most_rows: int
) -> dict[str, object]:
    """Return the page's data for JSON, with the tables thinned to `most_rows` rows each."""
    thinned = {name: thin_table(table, most_rows) for name, table in tables.items()}
    return {
        "charts": [asdict(chart) for chart in charts],
        "tables": {
            name: {key: packed(table_column) for key, table_column in table.items()} for name, table in thinned.items()
        },
        "heats": [
            {
                **{key: getattr(heat, key) for key in ("id", "title", "unit", "rows", "at", "log", "across")},
                "measures": {name: packed(values.ravel()) for name, values in heat.measures.items()},
            }
            for heat in heats
        ],
    }


def words_of(label: str, table: Table, y: str, at: str = "step") -> str:
    """Describe a curve: number of values, first, last, lowest and highest; "" without values."""
    present = ~np.isnan(table[y])
    values, where = table[y][present], table[at][present]
    if not len(values):
        return ""
    if len(values) == 1:
        return f"{label}: {values[0]:.4g} at {at} {where[0]:,.6g}"
    low, high = int(values.argmin()), int(values.argmax())
    return (
        f"{label}: {len(values):,} values, first {values[0]:.4g}, last {values[-1]:.4g}, "
        f"lowest {values[low]:.4g} at {at} {where[low]:,.6g}, highest {values[high]:.4g} at {at} {where[high]:,.6g}"
    )


def drawn_charts(charts: Iterable[Chart], tables: Mapping[str, Table]) -> tuple[Chart, ...]:
    """Return the charts that have values, each with its non-empty lines, and a description."""
    result = []
    for chart in charts:
        lines = tuple(line for line in chart.lines if not np.isnan(tables[line.table][line.y]).all())
        words = "; ".join(words_of(line.label, tables[line.table], line.y, chart.axes[0]) for line in lines[:8])
        more = f"; and {len(lines) - 8} more lines" if len(lines) > 8 else ""
        if lines:
            result.append(replace(chart, lines=lines, words=words + more))
    return tuple(result)


def training_tables(run: Run) -> dict[str, Table]:
    """Return the steps, the epochs, and the parts of rank 0's steps in seconds."""
    steps, at = run.with_times("step")
    # a run that stops within an epoch and resumes writes two events for it, of which the last one counts
    epochs = {event["epoch"]: (event, at) for event, at in zip(*run.with_times("epoch"), strict=True)}.values()
    table = table_of_events(steps, STEP_FIELDS, at)
    waits = {name: table_of_events(steps, (name,), at)[name] for name in ("data_wait_s", "comm_wait_s")}
    global_batch = run.start.get("global_batch") or np.nan
    with np.errstate(divide="ignore"):
        seconds = np.where(table["images_per_s"] > 0, global_batch / table["images_per_s"], np.nan)
    compute = np.maximum(seconds - np.nan_to_num(waits["data_wait_s"]) - np.nan_to_num(waits["comm_wait_s"]), 0)
    return {
        "steps": table,
        "epochs": table_of_events([event for event, _ in epochs], EPOCH_FIELDS, [at for _, at in epochs]),
        "parts": {**{axis: table[axis] for axis in ("step", "epoch", "time")}, "compute_s": compute, **waits},
    }


def training_charts(run: Run, tables: Mapping[str, Table]) -> tuple[Chart, ...]:
    """Return the charts of a training, without empty ones."""
    per_s = f"{unit_of(run.start)}/s"

    def step(y: str, label: str = "each step") -> Line:
        return Line(label=label, table="steps", y=y, kind=FAINT, smooths=True)

    def epoch(y: str, label: str) -> Line:
        return Line(label=label, table="epochs", y=y)

    def part(y: str, label: str) -> Line:
        return Line(label=label, table="parts", y=y, smooths=True)

    loss = step("loss", "rank 0, each step"), epoch("train_loss", "training"), epoch("val_loss", "validation")
    accuracies = (("train_top1", "training top-1"), ("val_top1", "validation top-1"), ("val_top5", "validation top-5"))
    parts = part("compute_s", COMPUTE), part("comm_wait_s", COMM), part("data_wait_s", DATA)
    charts: tuple[tuple[str, str, str, tuple[Line, ...], bool], ...] = (
        ("loss", "Loss", "", loss, False),
        ("accuracy", "Accuracy", "%", tuple(epoch(*accuracy) for accuracy in accuracies), False),
        ("rate", "Learning rate", "", (Line(label="learning rate", table="steps", y="rate"),), True),
        ("throughput", "Throughput", per_s, (step("images_per_s"), epoch("images_per_s", "mean of the epoch")), True),
        ("parts", "Time of rank 0's steps", "s", parts, True),
    )
    curves_of_epochs = (
        Chart(id=name, title=title, unit=unit, lines=lines, from_zero=from_zero)
        for name, title, unit, lines, from_zero in charts
    )
    return drawn_charts(curves_of_epochs, tables)


def usage_charts(usage: Usage) -> tuple[tuple[Chart, ...], dict[str, Table]]:
    """Return charts of each worker's busy CPUs and memory and each host's network over the running time; and tables."""
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
        chart("cpu", "CPU per worker", "CPUs", ("workers", of_workers(busy_cpus)), limits=cpus),
        chart(
            "memory",
            "Memory per worker",
            "GiB",
            ("workers", of_workers(lambda r: r.rss_bytes / GIB)),
            limits={"estimated peak": max(estimates)} if estimates else {},
        ),
        chart("network", "Network per host", "MB/s", *network, limits={}),
    )
    return drawn_charts(charts, tables), tables


def _shown(records: Sequence[HostUse], *, alone: bool) -> list[str]:
    """Return the busiest interface to other hosts; on a single host also the loopback, which its ranks use."""
    names = interfaces_of(records)
    return [name for name in names if name != LOOPBACK][:1] + ([LOOPBACK] if alone and LOOPBACK in names else [])


def _lines(name: str, what: str, curves: Sequence[Curve], tables: dict[str, Table]) -> list[Line]:
    """Return a step-shaped line for each curve, or the mean and range of many curves."""
    if len(curves) <= MAX_LINES:
        for i, (_, starts, ends, values) in enumerate(curves):
            tables[f"{name}-{i}"] = {"time": np.stack((starts, ends), axis=1).ravel(), "y": values.repeat(2)}
        return [Line(label=curve[0], table=f"{name}-{i}", y="y") for i, curve in enumerate(curves)]
    grid = np.linspace(0, max(ends[-1] for _, _, ends, _ in curves), GRID)
    on_grid = np.ma.masked_invalid([_on_grid(grid, curve) for curve in curves])
    parts = {"mean": on_grid.mean(axis=0), "lowest": on_grid.min(axis=0), "highest": on_grid.max(axis=0)}
    tables[name] = {"time": grid, **{part: np.ma.filled(values, np.nan) for part, values in parts.items()}}
    kinds = {"mean": LINE, "lowest": LOW, "highest": HIGH}
    return [Line(label=f"{len(curves)} {what}: {part}", table=name, y=part, kind=kinds[part]) for part in parts]


def _level(table: str, label: str, value: float, lines: Sequence[Line], tables: dict[str, Table]) -> Line:
    """Return a constant line over the time range of these lines."""
    ends = [tables[line.table]["time"][index] for line in lines for index in (0, -1)]
    tables[table] = {"time": np.array([min(ends), max(ends)]), "y": np.full(2, value)}
    return Line(label=label, table=table, y="y", kind=LIMIT)


def _on_grid(grid: np.ndarray, curve: Curve) -> np.ndarray:
    """Return a curve's value at each point of the grid; NaN outside of its range."""
    _, starts, ends, values = curve
    index = np.minimum(np.searchsorted(ends, grid), len(ends) - 1)
    covered = (grid >= starts[0]) & (grid <= ends[-1])
    return np.where(covered, values[index], np.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """Mean seconds of a step on one rank, by part."""

    rank: int
    compute_s: float
    comm_s: float
    data_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute_s + self.comm_s + self.data_s

    @property
    def percents(self) -> tuple[float, float, float]:
        """Compute, communication wait and data wait in percent of the step."""
        whole = self.seconds or 1.0
        return 100 * self.compute_s / whole, 100 * self.comm_s / whole, 100 * self.data_s / whole


def rank_times(run: Run) -> tuple[RankSeconds, ...]:
    """Return each rank's mean step from the records since the last start, without the first record, when caches are
    cold. Without such records, return rank 0's mean over its steps."""
    records, steps, images = _of_last_start(run), run.of("step"), run.start.get("global_batch")
    if records:
        used = records[1:] or records
        weights = np.array([record["steps"] for record in used], dtype=float)
        if not weights.sum():
            return ()
        means = [np.average(values, axis=0, weights=weights) for values in _seconds(used)]
    else:
        timed = [step for step in steps[1:] or steps if step["images_per_s"] > 0]
        if not timed or not images:
            return ()
        waits = ([step.get(name, 0.0) for step in timed] for name in ("comm_wait_s", "data_wait_s"))
        means = [
            np.mean(seconds, keepdims=True) for seconds in ([images / step["images_per_s"] for step in timed], *waits)
        ]
    return tuple(
        RankSeconds(rank=i, compute_s=max(float(whole - comm - data), 0.0), comm_s=float(comm), data_s=float(data))
        for i, (whole, comm, data) in enumerate(zip(*means, strict=True))
    )


def _seconds(records: Sequence[dict[str, Any]]) -> list[np.ndarray]:
    """Return whole steps, communication waits and data waits, each by record (rows) and rank (columns)."""
    return [np.array([record[name] for record in records]) for name in ("seconds", "comm_wait_s", "data_wait_s")]


def mean_shares(times: Sequence[RankSeconds]) -> list[tuple[str, float]]:
    """Return the parts of a step with their mean percentage over the ranks; [] without ranks."""
    means = np.mean([time.percents for time in times], axis=0).tolist() if times else ()
    return list(zip((COMPUTE, COMM, DATA), means, strict=False))


def _of_last_start(run: Run) -> list[dict[str, Any]]:
    """Return the records since the number of ranks last changed."""
    records = run.of("ranks")
    count = len(records[-1]["seconds"]) if records else 0
    first = next((i + 1 for i in reversed(range(len(records))) if len(records[i]["seconds"]) != count), 0)
    return records[first:]


def shown_bars(times: Sequence[RankSeconds]) -> tuple[RankSeconds, ...]:
    """Return all ranks; if there are many, those that compute longest (others wait) and shortest (they wait)."""
    if len(times) <= MAX_BARS:
        return tuple(times)
    by_compute = sorted(times, key=lambda time: -time.compute_s)
    return (*by_compute[: MAX_BARS // 2], *by_compute[-MAX_BARS // 2 :])


def time_heat(run: Run) -> Heat | None:
    """Return the seconds of a step by rank (rows) and step (columns); None without per-rank records."""
    records = _of_last_start(run)
    if not records or not records[0]["seconds"]:
        return None
    whole, comm, data = (column_seconds.T for column_seconds in _seconds(records))
    compute = np.maximum(whole - comm - data, 0.0)
    measures = {COMPUTE: compute, COMM: comm, DATA: data, "whole step": whole}
    ranks = len(compute)
    groups, columns = _groups(ranks, MAX_HEAT_ROWS), _groups(len(records), MAX_HEAT_COLUMNS)
    slowest = int(compute.mean(axis=1).argmax())
    return Heat(
        id="ranks",
        title="Seconds of a step, by rank",
        unit="s",
        rows=tuple(f"rank {g[0]}" if len(g) == 1 else f"ranks {g[0]} to {g[-1]}" for g in groups),
        at=tuple(records[c[-1]]["step"] for c in columns),
        measures={name: _largest(values, groups, columns) for name, values in measures.items()},
        words=(
            f"{plural(ranks, 'rank')} over {plural(len(records), 'record')}, the last one at step "
            f"{records[-1]['step']:,}; rank {slowest} "
            f"computes longest, {compute[slowest].mean():.4g} s per step on average (all: {compute.mean():.4g} s)"
        ),
    )


def _groups(count: int, limit: int) -> list[np.ndarray]:
    """Split the numbers below `count` into at most `limit` groups of equal size."""
    return np.array_split(np.arange(count), min(count, limit))


def _largest(values: np.ndarray, rows: Sequence[np.ndarray], columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return the maximum of each group of rows and columns."""
    by_row = np.stack([values[group].max(axis=0) for group in rows])
    return np.stack([by_row[:, group].max(axis=1) for group in columns], axis=1)


def trust_heat(run: Run) -> Heat | None:
    """Return each layer's trust ratio over the steps, or without LARS the ratio of weight and gradient norms; None
    without records of them."""
    records = run.of("ratios")
    layers = [layer["layer"] for layer in records[-1]["layers"]] if records else []
    if not layers:
        return None
    by_layer = [{layer["layer"]: layer for layer in record["layers"]} for record in records]
    has_trust = any(layer.get("trust") is not None for layer in records[-1]["layers"])
    names = {"weights / gradients": "ratio", "weight norm": "weights", "gradient norm": "gradients"}
    if has_trust:
        names = {"trust ratio": "trust", **names}
    measures = {
        name: np.array([[_number(seconds.get(layer, {}).get(key)) for seconds in by_layer] for layer in layers])
        for name, key in names.items()
    }
    columns, singles = _groups(len(records), MAX_HEAT_COLUMNS), _groups(len(layers), len(layers))
    first = next(iter(measures.values()))[:, -1]
    comparable = np.where(np.isnan(first), -np.inf, first)
    title = "Trust ratios" if has_trust else "Norms of weights and gradients"
    return Heat(
        id="trust",
        title=f"{title}, by layer",
        unit="",
        rows=tuple(layers),
        at=tuple(records[c[-1]]["step"] for c in columns),
        measures={name: _largest(values, singles, columns) for name, values in measures.items()},
        words=(
            f"{plural(len(layers), 'layer')} over {plural(len(records), 'record')}; at the last one "
            f"{next(iter(measures))} is highest in {layers[int(comparable.argmax())]} ({comparable.max():.4g})"
        ),
        log=True,
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else np.nan
