"""The output of a training: lines and a progress bar on rank 0's terminal, and events in events.jsonl."""

from collections.abc import Sequence
from dataclasses import dataclass

from affinity.wording import counted
from cputrain.checkpoints.folder import name_of
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import EventLog
from cputrain.runs.folder import CHECKPOINTS
from cputrain.training.metrics import Accuracy, StepResult
from cputrain.training.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """Writes to the terminal and to the event log of a run; both are silent on ranks other than 0."""

    recipe: Recipe
    progress: Progress
    events: EventLog

    def warn(self, step: int, message: str) -> None:
        """Report something that the user should know or change."""
        self.progress.line(f"warning: {message}")
        self.events.write("warning", step=step, what=message)

    def warn_of_damaged_images(self, step: int, names: Sequence[str]) -> None:
        """Report images that could not be read, of all ranks."""
        self.progress.line(f"warning: {counted(len(names), 'damaged image')} skipped: {'; '.join(names[:3])}")
        self.events.write("warning", step=step, what="damaged images", images=list(names))

    def checkpoint(self, step: int, steps_per_epoch: int, *, best: bool) -> None:
        """Report a checkpoint that has been written; its path is relative, so that a run's folder can be moved."""
        path = f"{CHECKPOINTS}/{name_of(step)}"
        self.events.write("checkpoint", step=step, epoch=step / steps_per_epoch, path=path, best=best)

    def step(
        self, result: StepResult, *, step: int, steps_per_epoch: int, lr: float, images: int, seconds: float
    ) -> None:
        """Report a step: `step` counts those done, `images` are those of all ranks."""
        epoch = (step - 1) // steps_per_epoch + 1
        self.progress.step(f"epoch {epoch}/{self.recipe.epochs}", images, loss=result.loss, lr=lr)
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
        figures = [f"{name} {value:.{digits}f}" for name, (value, digits) in values.items() if value is not None]
        self.progress.line(
            f"epoch {epoch}/{self.recipe.epochs}  {'  '.join(figures)}"
            f"  {seconds:.1f} s  ({_speed(self.recipe.data.kind, images / seconds)})"
        )
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
    unit = {"images": "img/s", "points": "points/s"}.get(kind, f"img/s, {kind}")
    return f"{per_s:.1f} {unit}"
