"""Where a training stands: everything that is neither a tensor nor in the recipe."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cputrain.checkpoints.manifest import TrainingRecord
from cputrain.training.metrics import EpochMetrics

METRICS = "epoch"  # the entry in the header of a rank's file


@dataclass(slots=True, kw_only=True)
class Position:
    """A training's progress: `step` counts the steps done, `best_score` is the best Accuracy.score so far.

    `epoch` are this rank's sums over the steps of the current epoch, `epoch_s` the seconds of these steps;
    `epoch_done`: the epoch that ends with this step has been evaluated and logged. `first_loss` and `diverged` belong
    to the warning of a diverging loss, `rollbacks` counts those to each checkpoint.
    """

    step: int = 0
    best_score: float = math.nan
    epoch: EpochMetrics = field(default_factory=EpochMetrics)
    epoch_s: float = 0.0
    epoch_done: bool = True
    first_loss: float | None = None
    diverged: bool = False
    rollbacks: dict[str, int] = field(default_factory=dict)

    def end_epoch(self) -> None:
        """The epoch that ends with this step is logged, and the next one begins."""
        self.epoch, self.epoch_s, self.epoch_done = EpochMetrics(), 0.0, True

    def metadata(self) -> dict[str, str]:
        """This rank's part, for the header of its file."""
        metrics = self.epoch
        sums = {"loss": metrics.loss, "correct": metrics.correct, "images": metrics.images, "damaged": metrics.damaged}
        return {METRICS: json.dumps({**sums, "seconds": self.epoch_s})}


def position_of(step: int, record: TrainingRecord, headers: Iterable[Mapping[str, str]]) -> Position:
    """The position of a checkpoint. `headers` are those of the files of the ranks whose sums this rank takes over."""
    position = Position(
        step=step,
        best_score=math.nan if record.best_score is None else record.best_score,
        epoch_done=record.epoch_done,
        first_loss=record.first_loss,
        diverged=record.diverged,
        rollbacks=dict(record.rollbacks),
    )
    for header in headers if not record.epoch_done else ():
        sums = json.loads(header[METRICS])
        position.epoch_s = max(position.epoch_s, sums.pop("seconds"))
        position.epoch.add(EpochMetrics(**sums))
    return position
