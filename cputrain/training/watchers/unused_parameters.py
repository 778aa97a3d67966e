"""Warn of parameters that the loss does not reach."""

from collections.abc import Callable
from dataclasses import dataclass

from cputrain.affinity.wording import first_named, plural
from cputrain.training.state import TrainState
from cputrain.training.step import StepResult, StepSettings
from cputrain.training.watchers.base import Watcher


@dataclass(slots=True, kw_only=True)
class UnusedParameters(Watcher):
    """Warns once of parameters without a gradient, which the first step finds."""

    state: TrainState
    warn: Callable[[int, str], None]
    warned: bool = False

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Warn if the step has found some."""
        if self.state.unused and not self.warned:
            self.warned = True
            count, names = plural(len(self.state.unused), "parameter"), first_named(list(self.state.unused))
            self.warn(step - 1, f"{count} without a gradient, on which the loss does not depend: {names}")
