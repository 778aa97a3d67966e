"""Log the step times of all ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cputrain.training.corrupt_images import CorruptImageCheck
from cputrain.training.snapshot import TrainProgress
from cputrain.training.step import StepResult, StepSettings
from cputrain.training.watchers.base import Watcher, every_rank
from cputrain.training.watchers.log import TrainingLog

INTERVAL_S, PER_RANK_S = 10.0, 0.1  # shortest interval between records, so that events.jsonl grows by <= 300 bytes/s
MAX_STEPS, SECOND_STEPS = 100_000, 100  # largest intervals in steps; the second one, as the first step is often slow


@dataclass(slots=True, kw_only=True)
class RankTimes(Watcher):
    """Logs each rank's mean step time, communication wait and data wait since the last record.

    The same all-reduce sums the damaged images of the current epoch, which `corrupt_images` checks. `set_step_time` is
    called with the slowest rank's mean step time, except after the first step, which is slow.

    All ranks take part in a record after the same step: the first step, then after as many steps as the slowest rank
    runs in the interval, which all ranks compute from the same values.
    """

    log: TrainingLog
    position: TrainProgress
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
        epoch = self.position.epoch
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
