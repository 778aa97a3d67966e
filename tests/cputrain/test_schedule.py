"""Schedules of learning rates: for any loop, without a recipe."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.schedule import Schedule, lr_at


@given(
    warmup=st.integers(0, 300),
    rest=st.integers(1, 5_000),
    start=st.floats(0, 1),
    peak=st.floats(0, 50),
    data=st.data(),
)
def test_the_default_is_two_straight_lines(
    warmup: int, rest: int, start: float, peak: float, data: st.DataObject
) -> None:
    total = warmup + rest
    schedule = Schedule(total_steps=total, peak_lr=peak, warmup_steps=warmup, start_lr=start)

    def lr(step: int) -> float:
        return lr_at(step, schedule)

    assert lr(0) == (start if warmup else peak)
    assert lr(warmup) == peak
    assert lr(total) == lr(total + 1) == 0
    step = data.draw(st.integers(1, total - 1)) if total > 1 else 0
    if step and step != warmup:
        assert lr(step + 1) - lr(step) == pytest.approx(lr(step) - lr(step - 1), abs=1e-9)
    assert 0 <= lr(step) <= max(start, peak) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        # AlexNet-BN at 32K: 32 (1 - step / 4000)^2
        (
            {"decay": "poly_from_start", "start_lr": 1.0},
            {0: 1.0, 200: 16.5, 400: 32 * 0.9**2, 2000: 8.0, 3999: 32 * (1 / 4000) ** 2, 4000: 0.0},
        ),
        ({"decay": "poly", "end_lr": 1e-4}, {400: 32.0, 2200: 1e-4 + (32 - 1e-4) / 4, 4000: 1e-4, 9000: 1e-4}),
        (
            {"decay": "steps", "milestones": (3000, 6000, 8000), "total_steps": 9000},
            {2999: 32.0, 3000: 3.2, 5999: 3.2, 6000: 0.32, 8000: 0.032},
        ),
        ({"decay": "cosine"}, {400: 32.0, 1300: 16 * (1 + 2**-0.5), 2200: 16.0, 4000: 0.0}),
        ({"decay": "constant"}, {3999: 32.0, 10**6: 32.0}),
    ],
)
def test_every_decay_is_that_of_its_source(how: dict, expected: dict[int, float]) -> None:
    """Rates worked out by hand from the published formulas."""
    schedule = Schedule(**{"total_steps": 4000, "peak_lr": 32.0, "warmup_steps": 400, **how})
    assert {step: lr_at(step, schedule) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"decay": "polynomial"}, "decay='polynomial' is none of linear, poly, poly_from_start, .*"),
        ({"warmup_steps": 11}, "warmup_steps=11 is not between 0 and total_steps=10"),
        ({"warmup_steps": -1}, "warmup_steps=-1 is not between 0 and total_steps=10"),
        ({"peak_lr": float("nan")}, "peak_lr=nan is not a number of 0 or more"),
        ({"power": -2.0}, "power=-2.0 is not a number of 0 or more"),
    ],
)
def test_numbers_that_do_not_fit_are_named(how: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Schedule(**{"total_steps": 10, "peak_lr": 1.0, **how})
