"""What is drawn of very many steps: few enough to open at once, with the lowest and the highest of each stretch."""

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.report import FEWEST_ROWS, MOST_ROWS, Chart, Line, charts_data, packed, rows_per_run, thin


def steps(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """The columns of so many steps."""
    random = np.random.default_rng(seed)
    at = np.arange(1, count + 1, dtype=float)
    values = {name: random.normal(size=count) for name in ("loss", "rate", "images_per_s")}
    return {"step": at, "epoch": at / 100, "time": at * 0.5, **values}


@given(st.integers(1, 3000), st.integers(20, 500), st.integers(0, 9))
def test_thinning_keeps_the_ends_and_the_lowest_and_highest_of_every_column(count: int, most: int, seed: int) -> None:
    table = steps(count, seed)
    kept = thin(table, most)
    assert len(kept["step"]) <= max(most, 2 * 3 + 2) + 6
    assert (kept["step"][0], kept["step"][-1]) == (1, count) and (np.diff(kept["step"]) > 0).all()
    for name in ("loss", "rate", "images_per_s"):
        assert kept[name].min() == table[name].min() and kept[name].max() == table[name].max()
    rows = kept["step"].astype(int) - 1
    assert all((kept[name] == table[name][rows]).all() for name in table)


def test_a_spike_of_one_step_in_a_million_stays_at_its_step() -> None:
    table = steps(1_000_000)
    table["loss"][654_321] = 1e3
    table["loss"][100:200] = np.nan
    kept = thin(table, rows_per_run(1))
    assert len(kept["step"]) <= MOST_ROWS
    assert kept["step"][np.nanargmax(kept["loss"])] == 654_322


@pytest.mark.parametrize(("runs", "events"), [(1, 1_000_000), (100, 10_000)])
def test_a_million_steps_stay_below_15_mb(runs: int, events: int) -> None:
    tables = {f"{run}.steps": steps(events, run) for run in range(runs)}
    tables |= {f"{run}.epochs": steps(events // 100, run) for run in range(runs)}
    chart = Chart(id="loss", title="Loss", unit="", lines=tuple(Line(label=t, table=t, y="loss") for t in tables))
    data = charts_data((chart,), tables, (), rows_per_run(runs))
    size = sum(len(text) for table in data["tables"].values() for text in table.values())  # type: ignore[attr-defined]
    assert size < 10e6, "the rest of the page, with its program, is below a megabyte"
    assert rows_per_run(runs) >= FEWEST_ROWS


def test_packed_numbers_are_float32_with_nan_for_what_is_missing() -> None:
    values = np.frombuffer(base64.b64decode(packed(np.array([1.5, np.nan, -3.0]))), "<f4")
    assert values[0] == 1.5 and np.isnan(values[1]) and values[2] == -3.0
