"""The log of a training: progress bar, printed lines and events, among them the step times of all ranks."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cputrain.checkpoint.files import checkpoint_name
from cputrain.files import CHECKPOINTS
from cputrain.runs.events import EventLog
from cputrain.training.corrupt_images import CorruptImageCheck
from cputrain.training.progress import REDRAW_S, TrainingBar
from cputrain.training.session import Session
from cputrain.training.snapshot import TrainProgress
from cputrain.training.step import Accuracy, StepResult, StepSettings
from cputrain.training.watchers.base import Watcher, every_rank

MAX_IN_FULL = 1e6  # a diverging loss would be printed with dozens of digits
INTERVAL_S, PER_RANK_S = 10.0, 0.1  # shortest interval between records, so that events.jsonl grows by <= 300 bytes/s
MAX_STEPS, SECOND_STEPS = 100_000, 100  # largest intervals in steps; the second one, as the first step is often slow


def open_log(session: Session, events: EventLog, step: int, *, quiet: bool) -> "TrainingLog":
    """Return the log of a training that continues after `step`; its bar must be closed."""
    env, recipe, sizes = session.context.env, session.recipe, session.sizes
    last_step = sizes.last_step(recipe.max_steps)
    bar = TrainingBar(
        sizes.images_until(step),
        sizes.images_until(last_step),
        unit=" img" if recipe.data.unit == "images" else f" {recipe.data.unit}",
        shown=session.is_main_rank,
        bar=not quiet,
        # Under cputrain's launcher the job redraws the bar or prints it as lines; a notebook redraws it, too.
        redrawn=session.context.startup.redrawn or "ipykernel" in sys.modules,
        redraw_s=float(env.get("TQDM_MININTERVAL", REDRAW_S)),
    )
    return TrainingLog(
        bar=bar,
        events=events,
        epochs=recipe.epochs,
        last_step=last_step,
        steps_per_epoch=sizes.steps_per_epoch,
        kind=recipe.data.kind,
        quiet=quiet,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog(Watcher):
    """Writes to the terminal and to the run's event log, on rank 0 only.

    `last_step` is the step after which the training ends; `kind` is data.kind. With `quiet` only warnings are printed.
    """

    bar: TrainingBar
    events: EventLog
    epochs: int
    last_step: int
    steps_per_epoch: int
    kind: str
    quiet: bool = False

    def warn(self, step: int, what: str, *, line: str | None = None, **fields: Any) -> None:
        """Print and log a warning. `line` replaces `what` on the terminal; `fields` are added to the event."""
        self.bar.line(f"warning: {line or what}")
        self.events.write("warning", step=step, what=what, **fields)

    def checkpoint(self, step: int, *, best: bool) -> None:
        """Log a written checkpoint; its path is relative, so that the run folder can be moved."""
        path = f"{CHECKPOINTS}/{checkpoint_name(step)}"
        self.events.write("checkpoint", step=step, epoch=step / self.steps_per_epoch, path=path, best=best)

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Show a step in the progress bar and log it."""
        epoch = (step - 1) // self.steps_per_epoch + 1
        where = f"epoch {epoch}/{self.epochs} step {step:,}/{self.last_step:,}"
        self.bar.step(where, settings, result, seconds)
        self.events.write(
            "step",
            step=step,
            epoch=step / self.steps_per_epoch,
            loss=result.loss,
            rate=settings.lr,
            images_per_s=settings.images / seconds,
            data_wait_s=result.data_wait_s,
            comm_wait_s=result.comm_wait_s,
        )
        if result.layer_ratios:
            self.events.write("ratios", step=step, rate=settings.lr, layers=result.layer_ratios)

    def rank_times(self, step: int, steps: int, times: Sequence[Sequence[float]]) -> None:
        """Log each rank's means over the last steps, in seconds: step, communication wait and data wait."""
        seconds, comm_wait_s, data_wait_s = ([float(f"{value:.4g}") for value in values] for values in times)
        self.events.write(
            "ranks", step=step, steps=steps, seconds=seconds, data_wait_s=data_wait_s, comm_wait_s=comm_wait_s
        )

    def epoch(
        self,
        *,
        step: int,
        epoch: int,
        train_loss: float,
        train_top1: float | None,
        accuracy: Accuracy | None,
        seconds: float,
        images: int,
    ) -> None:
        """Print and log an epoch, counted from 1; `accuracy` is None if it was not evaluated."""
        val_loss, val_top1 = (accuracy.loss, accuracy.top1) if accuracy and accuracy.images else (None, None)
        values = {"loss": (train_loss, 4), "acc": (train_top1, 2), "val loss": (val_loss, 4), "val acc": (val_top1, 2)}
        figures = [
            f"{name} {value:.{digits}f}" if abs(value) < MAX_IN_FULL else f"{name} {value:.3g}"
            for name, (value, digits) in values.items()
            if value is not None
        ]
        if not self.quiet:
            kind, done = self.kind, f"epoch {epoch}/{self.epochs}  {'  '.join(figures)}"
            unit = {"images": "img/s", "points": "points/s", "samples": "samples/s"}.get(kind, f"img/s, {kind}")
            self.bar.line(f"{done}  {seconds:.1f} s  ({images / seconds:.1f} {unit})")
        self.events.write(
            "epoch",
            step=step,
            epoch=epoch,
            train_loss=train_loss,
            train_top1=train_top1,
            val_loss=val_loss,
            val_top1=val_top1,
            val_top5=accuracy.top5 if accuracy else None,
            seconds=seconds,
            images_per_s=images / seconds,
        )


@dataclass(slots=True, kw_only=True)
class RankTimes(Watcher):
    """Logs each rank's mean step time, communication wait and data wait since the last record.

    The same all-reduce sums the damaged images of the current epoch, which `corrupt_images` checks. `set_step_time` is
    called with the slowest rank's mean step time, except after the first step, which is slow.

    All ranks take part in a record after the same step: the first step, then after as many steps as the slowest rank
    runs in the interval, which all ranks compute from the same values.
    """

    log: TrainingLog
    progress: TrainProgress
    corrupt_images: CorruptImageCheck
    set_step_time: Callable[[float], None]
    steps: int = 0
    due: int = 1
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Record a step of this rank."""
        for i, value in enumerate((seconds, result.comm_wait_s, result.data_wait_s)):
            self.sums[i] += value
        self.steps += 1
        if self.steps >= self.due:
            self.after_last_step(step)

    def after_last_step(self, step: int) -> None:
        """Log every rank's mean times since the last record, if there were steps.

        Raises InputError if too many images are damaged.
        """
        if not self.steps:
            return
        epoch = self.progress.epoch
        table = every_rank([*(value / self.steps for value in self.sums), len(epoch.damaged), epoch.images])
        slowest_s = float(table[:, 0].max())
        if self.steps > 1:
            self.set_step_time(slowest_s)
        interval_s = max(INTERVAL_S, PER_RANK_S * len(table))
        most = MAX_STEPS if self.steps > 1 else SECOND_STEPS
        self.due = min(max(round(interval_s / max(slowest_s, 1e-9)), 1), most)
        *times, damaged, readable = table.T.tolist()
        self.log.rank_times(step, self.steps, times)
        self.steps, self.sums = 0, [0.0, 0.0, 0.0]
        self.corrupt_images.epoch(epoch, damaged=sum(damaged), readable=sum(readable), ended=False)
