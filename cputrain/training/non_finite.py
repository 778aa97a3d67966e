"""NaN, Inf and diverging losses: skip the step, roll back or stop, as on_nan requests; warn of divergence."""

from dataclasses import dataclass, field

import torch.distributed as dist

from affinity.errors import RunError
from cputrain.comm.group import all_gather
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import DIVERGENCE_FACTOR
from cputrain.runs.folder import CHECKPOINTS, list_checkpoints
from cputrain.training.checkpoint import load_checkpoint
from cputrain.training.log import TrainingLog
from cputrain.training.metrics import StepResult
from cputrain.training.state import TrainState

MAX_ROLLBACKS = 3  # to one checkpoint


@dataclass(slots=True, kw_only=True)
class NonFiniteHandler:
    """Handles steps whose gradients contain NaN or Inf; `rollbacks` counts those to each checkpoint."""

    recipe: Recipe
    rank: int
    state: TrainState
    log: TrainingLog
    rollbacks: dict[str, int] = field(default_factory=dict)

    def handle(self, result: StepResult, *, step: int, lr: float) -> None:
        """Skip the step or restore the last checkpoint; else raise RunError on the rank where NaN or Inf arose.

        To be called by all ranks; `step` counts the steps done before.
        """
        message, origin = _describe(all_gather((result.loss, result.non_finite)), step, lr)
        saved = list_checkpoints(self.recipe.folder / CHECKPOINTS)
        if self.recipe.on_nan == "skip":
            self.log.warn(step, f"{message}: the step is skipped")
            return
        if self.recipe.on_nan == "rollback" and saved and self.rollbacks.get(saved[-1].name, 0) < MAX_ROLLBACKS:
            load_checkpoint(saved[-1], self.state)
            self.rollbacks[saved[-1].name] = self.rollbacks.get(saved[-1].name, 0) + 1
            self.log.warn(step, f"{message}: restored {saved[-1].name}, training continues with the next images")
            return
        if self.rank == origin:
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

    log: TrainingLog
    first_loss: float | None = None
    diverged: bool = False

    def check(self, loss: float, *, step: int, lr: float) -> None:
        """Compare a step's loss with the first one; `step` counts the steps done."""
        if self.first_loss is None:
            self.first_loss = loss
        elif loss > DIVERGENCE_FACTOR * self.first_loss and not self.diverged:
            self.diverged = True
            self.log.warn(
                step,
                f"the loss is {loss:.3g} at step {step}, {loss / self.first_loss:.0f} times that of the first step, "
                f"learning rate {lr:g}: lower schedule.peak_rate, or lengthen the warm-up",
            )
