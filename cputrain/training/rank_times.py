"""Where each rank's time goes, and its damaged images: collected from all ranks now and then, logged by rank 0."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from cputrain.training.damage import DamageCheck
from cputrain.training.log import TrainingLog
from cputrain.training.metrics import StepResult
from cputrain.training.saving.position import Position

INTERVAL_S, PER_RANK_S = 10.0, 0.1  # between records at least: so events.jsonl grows by 300 bytes/s at most
MOST_STEPS, SECOND_STEPS = 100_000, 100  # the first step, which is slow, tells little of the others


@dataclass(slots=True, kw_only=True)
class RankTimes:
    """This rank's seconds since the last record: whole steps, waiting for communication, waiting for data.

    The damaged images of the epoch of `position` are added up in the same exchange, and checked by `damage`.

    `slowest_s` is the slowest rank's mean step at the last record of several steps, 0 before: the first step is slow.

    Every rank takes part in a record after the same step: the first one, then as many steps later as the slowest rank
    needs for the interval, which all ranks compute from the same numbers.
    """

    log: TrainingLog
    rank: int
    position: Position
    damage: DamageCheck
    steps: int = 0
    due: int = 1
    slowest_s: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def add(self, result: StepResult, seconds: float, step: int) -> None:
        """Add a step of this rank; `step` counts the steps done."""
        for i, value in enumerate((seconds, result.comm_wait_s, result.data_wait_s)):
            self.sums[i] += value
        self.steps += 1
        if self.steps >= self.due:
            self.record(step)

    def record(self, step: int) -> None:
        """Log the mean step of every rank since the last record, if there was one. To be called by all ranks.

        Raises InputError where too many images are damaged.
        """
        if not self.steps:
            return
        ranks = dist.get_world_size()
        epoch, means = self.position.epoch, [value / self.steps for value in self.sums]
        table = torch.zeros(ranks, len(means) + 2, dtype=torch.float64)
        table[self.rank] = torch.tensor([*means, len(epoch.damaged), epoch.images], dtype=torch.float64)
        dist.all_reduce(table)
        slowest_s = float(table[:, 0].max())
        if self.steps > 1:
            self.slowest_s = slowest_s
        interval_s = max(INTERVAL_S, PER_RANK_S * ranks)
        most = MOST_STEPS if self.steps > 1 else SECOND_STEPS
        self.due = min(max(round(interval_s / max(slowest_s, 1e-9)), 1), most)
        *times, damaged, readable = table.T.tolist()
        self.log.rank_times(step, self.steps, times)
        self.steps, self.sums = 0, [0.0, 0.0, 0.0]
        self.damage.epoch(epoch, damaged=sum(damaged), readable=sum(readable), ended=False)
