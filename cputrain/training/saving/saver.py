"""What is saved when: every rank's state after the same step, and afterwards how the evaluation has ended."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from affinity.errors import InputError
from cputrain import __version__
from cputrain.checkpoints.manifest import (
    Manifest,
    NetworkRecord,
    OptimizerRecord,
    ScaleRecord,
    TrainingRecord,
    manifest_text,
)
from cputrain.recipe.loading import with_absolute_paths
from cputrain.recipe.schema.data import OWN
from cputrain.runs.folder import CHECKPOINTS
from cputrain.training.log import TrainingLog
from cputrain.training.saving.position import Position
from cputrain.training.saving.snapshot import optimizer_record, take_snapshot
from cputrain.training.saving.writer import CheckpointWriter
from cputrain.training.session import Session
from cputrain.training.state import TrainState


@dataclass(slots=True, kw_only=True)
class Saver:
    """Saves a training. To be called alike by all ranks; rank 0 logs what has been saved."""

    session: Session
    state: TrainState
    log: TrainingLog
    writer: CheckpointWriter = field(init=False)
    _began: float = field(default_factory=time.monotonic)
    _unlogged: tuple[int, bool] | None = None  # a step that is being saved, and whether it is the best

    def __post_init__(self) -> None:
        session = self.session
        self.writer = CheckpointWriter(
            folder=session.recipe.folder / CHECKPOINTS,
            keys=session.ranks.group.keys,
            rank=session.ranks.this.rank,
            world_size=session.ranks.this.world_size,
            keep=session.recipe.checkpoint.keep,
            pus=session.binding.loader_pus,
        )

    @property
    def is_due(self) -> bool:
        """Whether checkpoint.every_minutes have passed since the last one, and it is written. Rank 0's counts."""
        wanted = self.session.recipe.checkpoint
        if wanted.every_minutes is None or wanted.every_steps is not None or self.writer.busy:
            return False
        return time.monotonic() - self._began >= 60 * wanted.every_minutes

    def save(self, position: Position) -> None:
        """Begin to save this step; waits for the checkpoint before, and for its own copies only."""
        self.wait()
        self._began = time.monotonic()
        rank = self.session.ranks.this.rank
        snapshot = take_snapshot(self.state, rank, self.session.recipe.optim.name)
        manifest = None
        if snapshot.optimizer is not None:
            manifest = self._manifest(position, snapshot.optimizer)
        self.writer.begin(position.step, snapshot, position.metadata(), manifest)
        self._unlogged = position.step, False

    def try_out(self, position: Position) -> None:
        """Make checkpoint.json in memory: what it cannot hold would end the training at its first checkpoint. Raises
        InputError."""
        if not self.session.ranks.is_main_rank:
            return
        try:
            record = optimizer_record(self.state.optimizer, self.state.network, self.session.recipe.optim.name)
            manifest_text(self._manifest(position, record))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            found = f"{place}={first['input']!r}: {first['msg']}"
            raise InputError(f"a checkpoint cannot hold {found}: set another value") from None
        except ValueError as error:
            raise InputError(f"a checkpoint cannot hold the state of this training: {error}") from None

    def check(self) -> None:
        """Log a checkpoint that has been written; raises what has gone wrong with it."""
        self.writer.check()
        if not self.writer.busy:
            self._log()

    def wait(self) -> None:
        """Wait until the last checkpoint is written; on rank 0 that is the whole one."""
        self.writer.wait()
        self._log()

    def finish(self, position: Position, *, best: bool) -> None:
        """Add to the checkpoint of this step that its epoch is evaluated and logged, and whether it is the best."""
        if not self.session.ranks.is_main_rank:
            return
        ends_epoch = position.step % self.session.sizes.steps_per_epoch == 0
        score = None if math.isnan(position.best_score) else position.best_score

        def change(manifest: Manifest) -> Manifest:
            # Within an epoch, where max_steps has ended it, a longer training goes on with every rank's own statistics.
            now = {"epoch_done": ends_epoch, "own_statistics": not ends_epoch, "best_score": score}
            return manifest.model_copy(update={"training": manifest.training.model_copy(update=now)})

        self.writer.amend(change, best=best)
        self._unlogged = position.step, best

    def _log(self) -> None:
        if self._unlogged is not None:
            step, best = self._unlogged
            self.log.checkpoint(step, self.session.sizes.steps_per_epoch, best=best)
            self._unlogged = None

    def _manifest(self, position: Position, optimizer: OptimizerRecord) -> Manifest:
        session = self.session
        recipe, data = session.recipe, session.data
        network = NetworkRecord(
            model={} if recipe.data.path == OWN else recipe.model.model_dump(mode="json", by_alias=True),
            classes=tuple(data.dataset.classes),
            features=data.features,
            crop=recipe.data.crop,
            resize=recipe.data.short_side,
            mean=recipe.data.mean,
            std=recipe.data.std,
        )
        training = TrainingRecord(
            epoch_done=position.epoch_done,
            own_statistics=True,
            best_score=None if math.isnan(position.best_score) else position.best_score,
            bucket_mib=self.state.bucket_mib,
            first_loss=position.first_loss,
            diverged=position.diverged,
            rollbacks=position.rollbacks,
            optimizer=optimizer,
        )
        values: dict[str, Any] = with_absolute_paths(recipe).model_dump(mode="json", by_alias=True)
        return Manifest(
            cputrain=__version__,
            step=position.step,
            network=network,
            scale=ScaleRecord(**session.scale.as_fields()),
            training=training,
            recipe=values,
            files={},
        )
