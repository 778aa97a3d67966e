"""The resource use of workers and hosts over time, as charts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from affinity.units import GIB
from cputrain.report.charts import HIGH, LIMIT, LINE, LOW, Chart, Line, drawn
from cputrain.report.tables import Table
from cputrain.report.usage import LOOPBACK, Usage, busy, interfaces_of, mb_per_s, running_time
from mpi.usage.records import HostUse, WorkerUse

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
