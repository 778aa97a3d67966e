"""Handle steps whose gradients contain NaN or Inf: stop, skip the step or restore a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from cputrain.affinity.errors import RunError
from cputrain.checkpoint.files import list_checkpoints
from cputrain.comm.group import all_gather
from cputrain.training.snapshot import TrainProgress, load_newest, rename_damaged, restore
from cputrain.training.state import TrainState
from cputrain.training.step import StepResult, StepSettings
from cputrain.training.watchers.base import Watcher

MAX_ROLLBACKS = 3  # to the same checkpoint


@dataclass(slots=True, kw_only=True)
class NonFiniteHandler(Watcher):
    """Handles steps whose gradients contain NaN or Inf, as on_nan requests.

    `folder` has the checkpoints, whose optimizer is `optimizer_name`; `wait` waits for the pending one.
    """

    on_nan: str
    folder: Path
    optimizer_name: str
    rank: int
    state: TrainState
    warn: Callable[[int, str], None]
    progress: TrainProgress
    wait: Callable[[], None]

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """If the gradients are not finite, skip the step or restore the newest checkpoint; else raise RunError on the
        rank where NaN or Inf arose. Messages count steps from 0, like the schedule."""
        if result.finite:
            return
        step -= 1
        message, origin = _describe(all_gather((result.loss, result.non_finite)), step, settings.lr)
        if self.on_nan == "skip":
            self.warn(step, f"{message}: the step is skipped")
            return
        self.wait()
        dist.barrier()  # rank 0 has completed the last checkpoint
        rollbacks = self.progress.rollbacks
        checkpoint = load_newest(self.folder, self.rank) if self.on_nan == "rollback" else None
        if checkpoint and rollbacks.get(checkpoint.path.name, 0) < MAX_ROLLBACKS:
            rename_damaged(checkpoint, self.warn, step, self.rank)
            restore(checkpoint, self.state, self.optimizer_name)
            rollbacks[checkpoint.path.name] = rollbacks.get(checkpoint.path.name, 0) + 1
            self.warn(step, f"{message}: restored {checkpoint.path.name}, training continues with the next images")
            return
        if self.rank == origin:
            saved = list_checkpoints(self.folder)
            kept = f"; checkpoint {saved[-1]} is kept" if saved else ""
            raise RunError(f"{message}: lower schedule.peak_rate, or set on_nan to skip or rollback{kept}")
        dist.barrier()  # the rank that raises exits, which ends this wait


def _describe(results: list[tuple[float, str]], step: int, lr: float) -> tuple[str, int]:
    """Return a line about the first rank whose outputs contain NaN or Inf, else about the gradients, and the rank."""
    first = next((rank for rank, (_, non_finite) in enumerate(results) if non_finite), 0)
    loss, non_finite = results[first]
    where = non_finite or "NaN or Inf in the gradients only"
    return f"rank {first}: loss {loss:g} at step {step}, {where}, learning rate {lr:g}", first
