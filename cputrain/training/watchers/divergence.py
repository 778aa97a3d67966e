"""Warn of a loss that diverges."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from cputrain.runs.events import DIVERGENCE_FACTOR
from cputrain.training.snapshot import TrainProgress
from cputrain.training.step import StepResult, StepSettings
from cputrain.training.watchers.base import Watcher


@dataclass(slots=True, kw_only=True)
class DivergenceCheck(Watcher):
    """Warns once if the loss diverges, which shows a too high learning rate long before NaN appears."""

    warn: Callable[[int, str], None]
    position: TrainProgress

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Compare the loss with the first step's."""
        loss, first = result.loss, self.position.first_loss
        if first is None:
            self.position.first_loss = loss if math.isfinite(loss) else None
        elif loss > DIVERGENCE_FACTOR * first > 0 and not self.position.diverged:  # a user's loss may be negative
            self.position.diverged = True
            self.warn(
                step,
                f"the loss is {loss:.3g} at step {step}, {loss / first:.0f} times the loss of the first step, "
                f"learning rate {settings.lr:g}: lower schedule.peak_rate, or lengthen the warm-up",
            )
