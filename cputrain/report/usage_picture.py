"""The resource use of workers and hosts over time, as SVG."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from affinity.units import GIB
from cputrain.report.curves import figure_svg
from cputrain.report.usage import LOOPBACK, Usage, busy, interfaces_of, mb_per_s, running_time
from mpi.usage.records import HostUse, WorkerUse

MOST_LINES = 8  # with more, their mean and range
GRID = 400  # points of that mean
UNITS = ((7200.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))

Curve = tuple[str, np.ndarray, np.ndarray, np.ndarray]  # label, when each value begins, when it ends, values


def usage_picture(usage: Usage) -> str:
    """SVG: busy CPUs and memory of each worker, network of each host, over the running time."""
    clock = running_time(usage)
    length = float(max(clock([records[-1].time for records in usage.workers.values()])))
    _, divisor, unit = next(each for each in UNITS if length >= each[0])
    figure, (cpu, memory, network) = plt.subplots(3, 1, figsize=(9, 8), sharex=True, layout="constrained")

    def curve(label: str, records: Sequence[Any], value: Callable[[Any], float]) -> Curve:
        starts, ends = clock([r.time - r.seconds for r in records]), clock([r.time for r in records])
        return label, starts / divisor, ends / divisor, np.array([value(r) for r in records])

    def of_workers(value: Callable[[WorkerUse], float]) -> list[Curve]:
        return [curve(f"rank {rank}", records, value) for rank, records in usage.workers.items()]

    _draw(cpu, of_workers(busy), "workers")
    _refer(cpu, [len(plan.pus) for plan in usage.planned.values()], "planned CPUs")
    cpu.set(ylabel="CPUs busy", title="CPU per worker")
    _draw(memory, of_workers(lambda r: r.rss_bytes / GIB), "workers")
    _refer(memory, [plan.memory_bytes / GIB for plan in usage.planned.values() if plan.memory_bytes], "estimated peak")
    memory.set(ylabel="GiB resident", title="Memory per worker")
    for direction, word, style in ((0, "received", "-"), (1, "sent", "--")):
        lines = [
            curve(f"{host} {name} {word}", records, mb_per_s(name, direction))
            for host, records in usage.hosts.items()
            for name in _drawn(records, alone=len(usage.hosts) == 1)
        ]
        _draw(network, lines, f"hosts, {word}", style)
    network.set(xlabel=f"running time, {unit}", ylabel="MB/s", title="Network per host")
    for axes in (cpu, memory, network):
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, length / divisor or None)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure_svg(figure)


def _drawn(records: Sequence[HostUse], *, alone: bool) -> list[str]:
    """The busiest interface to other hosts; on a single host also the loopback, which its ranks communicate over."""
    names = interfaces_of(records)
    return [name for name in names if name != LOOPBACK][:1] + ([LOOPBACK] if alone and LOOPBACK in names else [])


def _draw(axes: Any, curves: Sequence[Curve], what: str, style: str = "-") -> None:
    if len(curves) <= MOST_LINES:
        for i, (label, starts, ends, values) in enumerate(curves):
            edges = np.stack((starts, ends), axis=1).ravel()  # a level from its begin to its end
            axes.plot(edges, values.repeat(2), style, label=label, color=f"C{i}", linewidth=1.2)
        return
    grid = np.linspace(0, max(ends[-1] for _, _, ends, _ in curves), GRID)
    table = np.ma.masked_invalid([_on_grid(grid, curve) for curve in curves])
    (line,) = axes.plot(grid, table.mean(axis=0), style, label=f"{len(curves)} {what}: mean", linewidth=1.2)
    axes.fill_between(
        grid, table.min(axis=0), table.max(axis=0), color=line.get_color(), alpha=0.2, label="lowest to highest"
    )


def _on_grid(grid: np.ndarray, curve: Curve) -> np.ndarray:
    """A curve's value at each point of the grid; NaN where it has none."""
    _, starts, ends, values = curve
    found = np.minimum(np.searchsorted(ends, grid), len(ends) - 1)
    known = (grid >= starts[0]) & (grid <= ends[-1])
    return np.where(known, values[found], np.nan)


def _refer(axes: Any, values: Sequence[float], label: str) -> None:
    """Dashed lines at the smallest and the largest planned value."""
    for i, value in enumerate(sorted({min(values), max(values)} if values else ())):
        axes.axhline(value, color="gray", linestyle="--", linewidth=1.0, label="" if i else label)
