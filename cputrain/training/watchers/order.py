"""The watchers of a training in the order in which they are called, the small ones with their class."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from cputrain.affinity.wording import first_named, plural
from cputrain.files import CHECKPOINTS
from cputrain.runs.events import DIVERGENCE_FACTOR
from cputrain.runs.trackers import Trackers
from cputrain.training.corrupt_images import CorruptImageCheck
from cputrain.training.session import Session
from cputrain.training.snapshot import TrainProgress
from cputrain.training.state import TrainState
from cputrain.training.step import StepResult, StepSettings
from cputrain.training.watchers.base import Watcher
from cputrain.training.watchers.log import RankTimes, TrainingLog
from cputrain.training.watchers.non_finite import NonFiniteHandler
from cputrain.training.watchers.replicas import ReplicaCheck
from cputrain.training.watchers.stragglers import StragglerWatch


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


@dataclass(slots=True, kw_only=True)
class DivergenceCheck(Watcher):
    """Warns once if the loss diverges, which shows a too high learning rate long before NaN appears."""

    warn: Callable[[int, str], None]
    progress: TrainProgress

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Compare the loss with the first step's."""
        loss, first = result.loss, self.progress.first_loss
        if first is None:
            self.progress.first_loss = loss if math.isfinite(loss) else None
        elif loss > DIVERGENCE_FACTOR * first > 0 and not self.progress.diverged:  # a user's loss may be negative
            self.progress.diverged = True
            self.warn(
                step,
                f"the loss is {loss:.3g} at step {step}, {loss / first:.0f} times the loss of the first step, "
                f"learning rate {settings.lr:g}: lower schedule.peak_rate, or lengthen the warm-up",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerCheck(Watcher):
    """Warns of each experiment tracker that has failed, once."""

    trackers: Trackers
    warn: Callable[[int, str], None]

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Warn of trackers that have exited."""
        for failure in self.trackers.failures():
            self.warn(step, failure)


def make_watchers(
    session: Session,
    state: TrainState,
    progress: TrainProgress,
    log: TrainingLog,
    corrupt_images: CorruptImageCheck,
    *,
    trackers: Trackers,
    wait: Callable[[], None],
    set_step_time: Callable[[float], None],
) -> list[Watcher]:
    """Return the watchers of a training; they are called in this order. `wait` waits for the pending checkpoint;
    `set_step_time` gets the slowest rank's seconds of a step. All ranks must call this."""
    recipe, warn = session.recipe, log.warn
    replicas = ReplicaCheck(
        network=state.learner,
        optimizer=state.optimizer,
        every=recipe.compare_weights_every_steps,
        warn=warn,
        wait=wait,
        same_after=progress.step,
        wording=recipe.wording,
    )
    return [
        UnusedParameters(state=state, warn=warn),
        NonFiniteHandler(
            on_nan=recipe.on_nan,
            folder=recipe.folder / CHECKPOINTS,
            optimizer_name=recipe.optim.name,
            rank=session.rank.rank,
            state=state,
            warn=warn,
            progress=progress,
            wait=wait,
        ),
        log,
        RankTimes(log=log, progress=progress, corrupt_images=corrupt_images, set_step_time=set_step_time),
        DivergenceCheck(warn=warn, progress=progress),
        replicas,
        StragglerWatch(hosts=replicas.hosts, warn=warn, pus=session.context.worker.pus, read_s=lambda: replicas.read_s),
        TrackerCheck(trackers=trackers, warn=warn),
    ]
