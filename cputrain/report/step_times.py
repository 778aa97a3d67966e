"""Where the time of a step goes: computing, waiting for the other ranks, waiting for images; by rank and over time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cputrain.report.charts import Heat
from cputrain.report.run import Run

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
