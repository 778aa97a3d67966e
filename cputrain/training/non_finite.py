"""NaN, Inf and diverging losses: skip the step, roll back or stop, as on_nan requests; warn of divergence."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from affinity.errors import RunError
from cputrain.checkpoints.folder import list_checkpoints
from cputrain.comm.group import all_gather
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import DIVERGENCE_FACTOR
from cputrain.runs.folder import CHECKPOINTS
from cputrain.training.metrics import StepResult
from cputrain.training.saving.position import Position
from cputrain.training.saving.restore import find_newest, put_back, set_damaged_aside
from cputrain.training.state import TrainState

MAX_ROLLBACKS = 3  # to one checkpoint


@dataclass(slots=True, kw_only=True)
class NonFiniteHandler:
    """Handles steps whose gradients contain NaN or Inf; `warn` gets a step and a line, `wait` waits until the last
    checkpoint is written."""

    recipe: Recipe
    rank: int
    state: TrainState
    warn: Callable[[int, str], None]
    position: Position
    wait: Callable[[], None]

    def handle(self, result: StepResult, *, step: int, lr: float) -> None:
        """Skip the step or restore the last checkpoint; else raise RunError on the rank where NaN or Inf arose.

        To be called by all ranks; `step` counts the steps done before.
        """
        message, origin = _describe(all_gather((result.loss, result.non_finite)), step, lr)
        if self.recipe.on_nan == "skip":
            self.warn(step, f"{message}: the step is skipped")
            return
        self.wait()
        dist.barrier()  # rank 0 has completed the last checkpoint
        folder, rollbacks = self.recipe.folder / CHECKPOINTS, self.position.rollbacks
        found = find_newest(folder, self.rank) if self.recipe.on_nan == "rollback" else None
        if found and rollbacks.get(found.name, 0) < MAX_ROLLBACKS:
            set_damaged_aside(found, self.warn, step, self.rank)
            put_back(found.loaded, self.state, self.recipe.optim.name)
            rollbacks[found.name] = rollbacks.get(found.name, 0) + 1
            self.warn(step, f"{message}: restored {found.name}, training continues with the next images")
            return
        if self.rank == origin:
            saved = list_checkpoints(folder)
            kept = f"; checkpoint {saved[-1]} is kept" if saved else ""
            raise RunError(f"{message}: lower schedule.peak_rate, or set on_nan to skip or rollback{kept}")
        dist.barrier()  # the rank that raises exits, which ends this wait


def _describe(results: list[tuple[float, str]], step: int, lr: float) -> tuple[str, int]:
    """A line about the first rank whose outputs contain NaN or Inf, else about the gradients; and the rank."""
    first = next((rank for rank, (_, non_finite) in enumerate(results) if non_finite), 0)
    loss, non_finite = results[first]
    where = non_finite or "NaN or Inf in the gradients only"
    return f"rank {first}: loss {loss:g} at step {step}, {where}, learning rate {lr:g}", first


@dataclass(slots=True, kw_only=True)
class DivergenceCheck:
    """Warns once of a loss that diverges, which shows a learning rate that is too high long before NaN."""

    warn: Callable[[int, str], None]
    position: Position

    def check(self, loss: float, *, step: int, lr: float) -> None:
        """Compare a step's loss with the first one; `step` counts the steps done."""
        first = self.position.first_loss
        if first is None:
            self.position.first_loss = loss if math.isfinite(loss) else None
        elif loss > DIVERGENCE_FACTOR * first > 0 and not self.position.diverged:  # one's own loss may be negative
            self.position.diverged = True
            self.warn(
                step,
                f"the loss is {loss:.3g} at step {step}, {loss / first:.0f} times that of the first step, "
                f"learning rate {lr:g}: lower schedule.peak_rate, or lengthen the warm-up",
            )
