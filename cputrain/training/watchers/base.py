"""Base class of watchers, and the all-reduce that they share."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cputrain.training.step import StepResult, StepSettings


class Watcher:
    """Base class of the training loop's callbacks; subclasses override the methods they need and are listed
    in order.py. Every rank calls each method after the same steps, so methods may use collectives."""

    __slots__ = ()

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Called after each step, with its result and duration on this rank; `step` counts completed steps."""

    def before_save(self, step: int) -> None:
        """Called before the state after this step is saved."""

    def after_last_step(self, step: int) -> None:
        """Called once, after the last step."""


def every_rank(values: Sequence[float]) -> Tensor:
    """Return each rank's n values, shape (ranks, n), float64, by one all-reduce of rows that are zero elsewhere."""
    rows = torch.zeros(dist.get_world_size(), len(values), dtype=torch.float64)
    rows[dist.get_rank()] = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(rows)
    return rows
