"""What a training prints and logs: progress and events."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from tqdm import tqdm

from cputrain.affinity.terminal import printable_lines
from cputrain.affinity.wording import counted
from cputrain.checkpoints.folder import name_of
from cputrain.data.formats.dataset import causes
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import EventLog
from cputrain.runs.folder import CHECKPOINTS
from cputrain.training.metrics import Accuracy, StepResult

REDRAW_S = 0.5
EVALUATION = "{desc} [{n_fmt}/{total_fmt}] |{bar:20}| {remaining} left"
LINES = 10  # printed during an evaluation without a terminal
FORMAT = "{desc} |{bar:12}| {percentage:3.0f}% {remaining} left {rate_fmt}{postfix}"
DECAY = 0.9  # of earlier steps in the shares of waiting


class Progress:
    """The lines of a training, and with `bar` a bar of the images, or points, trained on; silent unless `shown`."""

    def __init__(
        self, done: int, images: int, *, unit: str, shown: bool, bar: bool, redraw_s: float = REDRAW_S
    ) -> None:
        self.shown = shown
        self._whole_s = self._data_s = self._comm_s = 0.0
        self._bar: Any = tqdm(
            total=images,
            initial=done,
            disable=not (shown and bar),
            desc="first step",
            unit=unit,
            file=sys.stderr,
            bar_format=FORMAT,
            mininterval=redraw_s,
            leave=False,
        )

    def step(
        self,
        where: str,
        images: int,
        *,
        loss: float,
        lr: float,
        seconds: float,
        data_wait_s: float,
        comm_wait_s: float,
    ) -> None:
        """Advance by one step of so many images, which took so long, of it waiting for data and for communication."""
        self._whole_s = DECAY * self._whole_s + seconds
        self._data_s = DECAY * self._data_s + data_wait_s
        self._comm_s = DECAY * self._comm_s + comm_wait_s
        data, comm = (100 * part / (self._whole_s or 1.0) for part in (self._data_s, self._comm_s))
        self._bar.set_description_str(where, refresh=False)
        self._bar.set_postfix_str(f"loss {loss:.4f}, lr {lr:.4g}, data {data:.0f} %, comm {comm:.0f} %", refresh=False)
        self._bar.update(images)

    def line(self, text: str) -> None:
        """Print a permanent line above the bar."""
        if self.shown:
            tqdm.write(printable_lines(text), file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


class EvaluationProgress:
    """The batches evaluated: a bar on a terminal, else a line after each tenth of them; silent on other ranks."""

    def __init__(self, steps: int, *, shown: bool, bar: bool, lines: TextIO) -> None:
        self._done, self._steps = 0, steps
        self._lines = lines if shown and not bar else None
        self._bar: Any = tqdm(
            total=steps,
            disable=not (shown and bar),
            desc="Evaluation",
            file=sys.stderr,
            bar_format=EVALUATION,
            mininterval=REDRAW_S,
            leave=False,
        )

    def step(self) -> None:
        """Advance by one batch."""
        self._bar.update()
        before, self._done = self._done, self._done + 1
        if self._lines and self._done * LINES // self._steps > before * LINES // self._steps:
            print(f"Evaluation [{self._done}/{self._steps}]", file=self._lines, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


MOST_IN_FULL = 1e6  # a loss that diverges has dozens of digits


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """Writes to the terminal and to the event log of a run; both are silent on ranks other than 0.

    `last_step` is the step after which the training ends; `quiet` leaves only warnings on the terminal.
    """

    recipe: Recipe
    progress: Progress
    events: EventLog
    last_step: int
    quiet: bool = False

    def warn(self, step: int, message: str) -> None:
        """Report something that the user should know or change."""
        self.progress.line(f"warning: {message}")
        self.events.write("warning", step=step, what=message)

    def warn_of_damaged_images(self, step: int, names: Sequence[str]) -> None:
        """Report images that could not be read, of all ranks."""
        self.progress.line(f"warning: {counted(len(names), 'damaged image')} skipped: {causes(names)}")
        self.events.write("warning", step=step, what="damaged images", images=list(names))

    def warn_of_straggler(self, step: int, rank: int, host: str, factor: float, cause: str) -> None:
        """Report a rank whose steps take `factor` times as long as the median rank's, and the likely cause."""
        what = f"rank {rank} on {host} takes {factor:.2f} times as long for a step as the median rank: {cause}"
        self.progress.line(f"warning: {what}")
        self.events.write("warning", step=step, what=what, rank=rank, host=host, factor=factor, cause=cause)

    def checkpoint(self, step: int, steps_per_epoch: int, *, best: bool) -> None:
        """Report a checkpoint that has been written; its path is relative, so that a run's folder can be moved."""
        path = f"{CHECKPOINTS}/{name_of(step)}"
        self.events.write("checkpoint", step=step, epoch=step / steps_per_epoch, path=path, best=best)

    def step(
        self, result: StepResult, *, step: int, steps_per_epoch: int, lr: float, images: int, seconds: float
    ) -> None:
        """Report a step: `step` counts those done, `images` are those of all ranks."""
        epoch = (step - 1) // steps_per_epoch + 1
        self.progress.step(
            f"epoch {epoch}/{self.recipe.epochs} step {step:,}/{self.last_step:,}",
            images,
            loss=result.loss,
            lr=lr,
            seconds=seconds,
            data_wait_s=result.data_wait_s,
            comm_wait_s=result.comm_wait_s,
        )
        self.events.write(
            "step",
            step=step,
            epoch=step / steps_per_epoch,
            loss=result.loss,
            rate=lr,
            images_per_s=images / seconds,
            data_wait_s=result.data_wait_s,
            comm_wait_s=result.comm_wait_s,
        )
        if result.layer_ratios:
            self.events.write("ratios", step=step, rate=lr, layers=result.layer_ratios)

    def rank_times(self, step: int, steps: int, times: Sequence[Sequence[float]]) -> None:
        """Report the mean of the last steps on each rank: seconds, of these waiting for communication and for data."""
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
        """Report an epoch, counted from 1; `accuracy` is None where it was not evaluated."""
        val_loss, val_top1 = (accuracy.loss, accuracy.top1) if accuracy and accuracy.images else (None, None)
        values = {"loss": (train_loss, 4), "acc": (train_top1, 2), "val loss": (val_loss, 4), "val acc": (val_top1, 2)}
        figures = [
            f"{name} {value:.{digits}f}" if abs(value) < MOST_IN_FULL else f"{name} {value:.3g}"
            for name, (value, digits) in values.items()
            if value is not None
        ]
        line = (
            f"epoch {epoch}/{self.recipe.epochs}  {'  '.join(figures)}"
            f"  {seconds:.1f} s  ({_speed(self.recipe.data.kind, images / seconds)})"
        )
        if not self.quiet:
            self.progress.line(line)
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


def _speed(kind: str, per_s: float) -> str:
    """Samples per second, with their kind where they are not images that were read."""
    unit = {"images": "img/s", "points": "points/s", "samples": "samples/s"}.get(kind, f"img/s, {kind}")
    return f"{per_s:.1f} {unit}"
