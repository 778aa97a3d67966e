"""Columns of numbers for the curves of a page: thinned so that the lowest and highest values stay, packed as text."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Table = Mapping[str, np.ndarray]
"""Columns of the same length, float64; NaN where there is no value. Those named in AXES never decrease."""

AXES = ("step", "epoch", "time")
MOST_ROWS = 160_000  # of all runs on a page: 50 bytes a row, and a browser draws them at once
FEWEST_ROWS = 400  # of a run, however many there are


def column(values: Iterable[Any]) -> np.ndarray:
    """Numbers as a column; None is NaN."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def table_of(
    events: Sequence[Mapping[str, Any]], names: Sequence[str], times: Sequence[float]
) -> dict[str, np.ndarray]:
    """The fields of events as columns, with their times in seconds since the run's first event."""
    columns = {name: column(event.get(name) for event in events) for name in ("step", "epoch", *names)}
    return {**columns, "time": column(times)}


def rows_per_run(runs: int) -> int:
    """The most rows of one run's table on a page with so many runs."""
    return max(MOST_ROWS // max(runs, 1), FEWEST_ROWS)


def thin(table: Table, most: int) -> Table:
    """At most about `most` rows: of equal stretches of rows those with the lowest and the highest value of each column,
    and the first and the last row."""
    rows = len(next(iter(table.values()), ()))
    values = [each for name, each in table.items() if name not in AXES]
    if rows <= most or not values:
        return table
    stretches = max((most - 2) // (2 * len(values)), 1)
    size = -(-rows // stretches)
    kept = {0, rows - 1}
    for each in values:
        padded = np.full(size * -(-rows // size), np.nan)
        padded[:rows] = each
        parts = padded.reshape(-1, size)
        firsts = np.arange(len(parts)) * size
        known = ~np.isnan(parts).all(axis=1)
        for extreme in (
            np.where(np.isnan(parts), np.inf, parts).argmin(1),
            np.where(np.isnan(parts), -np.inf, parts).argmax(1),
        ):
            kept.update((firsts + extreme)[known].tolist())
    index = np.array(sorted(kept))
    return {name: each[index] for name, each in table.items()}


def packed(values: np.ndarray) -> str:
    """Numbers as the base64 of little-endian float32, a quarter of the bytes of their digits."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()
