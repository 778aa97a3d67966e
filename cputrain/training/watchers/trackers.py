"""Watch the processes of experiment trackers."""

from collections.abc import Callable
from dataclasses import dataclass

from cputrain.runs.trackers import Trackers
from cputrain.training.step import StepResult, StepSettings
from cputrain.training.watchers.base import Watcher


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerCheck(Watcher):
    """Warns of each experiment tracker that has failed, once."""

    trackers: Trackers
    warn: Callable[[int, str], None]

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Warn of trackers that have exited."""
        for failure in self.trackers.failures():
            self.warn(step, failure)
