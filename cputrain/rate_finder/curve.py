"""The learning-rate range test (Smith 2017, arXiv:1506.01186, 3.3): loss over an exponentially growing rate.

The suggestion is the rate at which the smoothed loss falls fastest over the logarithm of the rate, as fastai and
Lightning have it.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

SMOOTHING = 0.9  # of earlier losses in the moving average
DIVERGED = 4.0  # times the lowest smoothed loss, from which on the test ends (fastai)
LEAST_FALL = 0.02  # of the first smoothed loss, that is more than noise


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeTest:
    """The rates of a test and the loss of each step; the last loss may be NaN or infinite, where the test has ended."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def smoothed(self) -> tuple[float, ...]:
        """The moving average of the losses, corrected for its start (Kingma and Ba 2015, 3)."""
        sums = accumulate(self.losses, lambda mean, loss: SMOOTHING * mean + (1 - SMOOTHING) * loss, initial=0.0)
        return tuple(mean / (1 - SMOOTHING**step) for step, mean in enumerate(sums) if step > 0)

    @property
    def diverged(self) -> bool:
        """Whether the loss is not finite, or far above its lowest."""
        smoothed = self.smoothed
        return not math.isfinite(smoothed[-1]) or smoothed[-1] > DIVERGED * min(smoothed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A learning rate, None where the test shows none, and the reason."""

    rate: float | None
    why: str


def rate_at(step: int, steps: int, low: float, high: float) -> float:
    """The rate of a step, from 0: from `low` to `high` by equal factors."""
    return float(low * (high / low) ** (step / (steps - 1)))


def suggest(test: RangeTest) -> Suggestion:
    """The rate at which the smoothed loss falls fastest, before it is lowest."""
    smoothed = [loss for loss in test.smoothed if math.isfinite(loss)]
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__) if smoothed else 0
    if lowest < 2 or smoothed[0] - smoothed[lowest] < LEAST_FALL * abs(smoothed[0]):
        why = "the loss does not fall: begin with a lower rate (--from), or take more steps (--steps)"
        if not test.diverged and lowest >= 2:
            why = "the loss hardly falls up to the highest rate: raise --to, or take more steps (--steps)"
        return Suggestion(rate=None, why=why)
    logs = [math.log(rate) for rate in test.rates[: lowest + 1]]
    slopes = [
        (smoothed[step + 1] - smoothed[step - 1]) / (logs[step + 1] - logs[step - 1]) for step in range(1, lowest)
    ]
    steepest = 1 + min(range(len(slopes)), key=slopes.__getitem__)
    end = "diverges after that" if test.diverged else "does not diverge up to the highest rate"
    return Suggestion(
        rate=test.rates[steepest],
        why=f"the loss falls fastest here; it is lowest at {test.rates[lowest]:.3g}, and {end}",
    )
