"""Save a training into its run folder: a check before the first step, then checkpoints while the training goes on.

All ranks save after the same step. Rank 0 later adds the result of the evaluation.
"""

import math
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cputrain import __version__
from cputrain.affinity.binding import bind_thread
from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import write_bytes
from cputrain.checkpoint.files import content_text, rank_file, remove_partial
from cputrain.checkpoint.writer import CheckpointWriter, wait_until_visible
from cputrain.comm.group import all_gather, run_on_main_rank
from cputrain.data.settings import USER_SAMPLES
from cputrain.files import CHECKPOINTS
from cputrain.manifest import Manifest, NetworkRecord, OptimizerRecord, TrainingRecord, first_error
from cputrain.training.session import Session
from cputrain.training.snapshot import Loaded, TrainProgress, load_newest, optimizer_record, take_snapshot
from cputrain.training.state import TrainState
from cputrain.training.watchers.log import TrainingLog

TRIAL = ".trial.partial"


def newest_checkpoint(session: Session, *, resume: bool) -> Loaded | None:
    """Remove what killed writers have left, on rank 0, and return the newest checkpoint, with `resume`. All ranks must
    call this."""
    folder = session.recipe.folder / CHECKPOINTS
    if session.is_main_rank:
        remove_partial(folder)
    return load_newest(folder, session.rank.rank, session.recipe.wording) if resume else None


@dataclass(slots=True, kw_only=True)
class Saver:
    """Saves a training; rank 0 logs the checkpoints. All ranks must make the same calls."""

    session: Session
    state: TrainState
    log: TrainingLog
    writer: CheckpointWriter = field(init=False)
    _began: float = field(default_factory=time.monotonic)
    _unlogged: tuple[int, bool] | None = None  # step of the pending checkpoint, and whether it is the best

    def __post_init__(self) -> None:
        session = self.session
        self.writer = CheckpointWriter(
            folder=session.recipe.folder / CHECKPOINTS,
            keys=session.group.keys,
            rank=session.rank.rank,
            world_size=session.rank.world_size,
            keep=session.recipe.checkpoint.keep,
            enter=partial(bind_thread, tuple(session.context.loader_pus)),
        )

    @property
    def is_due(self) -> bool:
        """Whether checkpoint.every_minutes have passed since the last checkpoint, and it is written. Rank 0 decides."""
        section = self.session.recipe.checkpoint
        if section.every_minutes is None or section.every_steps is not None or self.writer.busy:
            return False
        return time.monotonic() - self._began >= 60 * section.every_minutes

    def save(self, progress: TrainProgress) -> None:
        """Start to save this step. Only waits for the previous checkpoint, then copies the state."""
        self.wait()
        self._began = time.monotonic()
        rank = self.session.rank.rank
        snapshot = take_snapshot(self.state, rank, self.session.recipe.optim.name)
        content = None
        if snapshot.optimizer is not None:
            content = self._manifest(progress, snapshot.optimizer).model_dump(mode="json")
        self.writer.begin(progress.step, snapshot.files, progress.metadata(), content)
        self._unlogged = progress.step, False

    def try_out(self, progress: TrainProgress) -> None:
        """Check before training that checkpoints can be saved: build checkpoint.json in memory and test the folder.
        All ranks must call this. Raises InputError on every rank."""
        run_on_main_rank(lambda: self._try_manifest(progress))
        averages = 1 if self.state.averages is None else 2
        weights = sum(value.nbytes for value in self.state.network.state_dict().values())
        trained = sum(value.nbytes for value in self.state.learner.trained().values())
        needed = averages * weights + self.session.recipe.optim.state_copies * trained
        rank = self.session.rank
        try_out(self.writer.folder, rank.rank, needed, first_on_host=rank.local_rank == 0)

    def _try_manifest(self, progress: TrainProgress) -> None:
        try:
            record = optimizer_record(self.state.optimizer, self.state.learner, self.session.recipe.optim.name)
            content_text(self._manifest(progress, record).model_dump(mode="json"))
        except ValidationError as error:
            place, first = first_error(error)
            value = f"{place}={first['input']!r} ({first['msg']})"
            raise InputError(f"checkpoints cannot store {value}: set another value") from None
        except ValueError as error:
            raise InputError(f"checkpoints cannot store the state of this training: {error}") from None

    def check(self) -> None:
        """Log a completed checkpoint; raise the exception if its write failed."""
        self.writer.check()
        if not self.writer.busy:
            self._log()

    def wait(self) -> None:
        """Wait for the pending write: this rank's files, or on rank 0 the complete checkpoint."""
        self.writer.wait()
        self._log()

    def finish(self, progress: TrainProgress, *, best: bool) -> None:
        """Record in this step's checkpoint that its epoch is evaluated and logged, and whether it is the best."""
        if not self.session.is_main_rank:
            return
        ends_epoch = progress.step % self.session.sizes.steps_per_epoch == 0
        score = None if math.isnan(progress.best_score) else progress.best_score

        def change(content: dict[str, Any]) -> dict[str, Any]:
            # If max_steps ended the training within an epoch, a longer one continues with each rank's own statistics.
            now = {"epoch_done": ends_epoch, "own_statistics": not ends_epoch, "best_score": score}
            return {**content, "training": {**content["training"], **now}}

        self.writer.amend(change, best=best)
        self._unlogged = progress.step, best

    def _log(self) -> None:
        if self._unlogged is not None:
            step, best = self._unlogged
            self.log.checkpoint(step, best=best)
            self._unlogged = None

    def _manifest(self, progress: TrainProgress, optimizer: OptimizerRecord) -> Manifest:
        session = self.session
        recipe = session.recipe
        network = NetworkRecord(
            model={} if recipe.data.path == USER_SAMPLES else recipe.model.model_dump(mode="json", by_alias=True),
            classes=tuple(session.dataset.classes),
            features=session.features,
            crop=recipe.data.crop,
            resize=recipe.data.short_side,
            mean=recipe.data.mean,
            std=recipe.data.std,
        )
        training = TrainingRecord(
            epoch_done=progress.epoch_done,
            own_statistics=True,
            best_score=None if math.isnan(progress.best_score) else progress.best_score,
            bucket_mib=self.state.bucket_mib,
            winograd=None if self.state.winograd is None else tuple(self.state.winograd),
            operators=self.state.operators,
            first_loss=progress.first_loss,
            diverged=progress.diverged,
            rollbacks=progress.rollbacks,
            optimizer=optimizer,
        )
        values: dict[str, Any] = recipe.with_absolute_paths().model_dump(mode="json", by_alias=True)
        return Manifest(
            cputrain=__version__,
            step=progress.step,
            network=network,
            scale=session.scale,
            training=training,
            recipe=values,
            files={},
        )


def try_out(folder: Path, rank: int, needed: int, *, first_on_host: bool) -> None:
    """Check that every host can write into the folder, that rank 0 sees these files, and that `needed` bytes are
    free; local rank 0 of each host writes. Raises InputError on every rank."""
    place, problem = folder / TRIAL, ""
    trial = place / rank_file(rank)
    if first_on_host:
        try:
            write_bytes(trial, TRIAL.encode())
        except OSError as error:
            problem = f"rank {rank} cannot write into {folder}: {error.strerror}"
    tries = all_gather((problem, rank_file(rank) if first_on_host else None))
    try:
        if problems := [text for text, _ in tries if text]:
            raise InputError(f"{problems[0]}: set output to a folder to which all hosts can write")
        run_on_main_rank(lambda: _check_trial(folder, place, [name for _, name in tries if name], needed))
    finally:
        with suppress(OSError):  # not empty while other ranks' files exist: the last rank removes the folder
            trial.unlink(missing_ok=True)
            place.rmdir()


def _check_trial(folder: Path, place: Path, names: Sequence[str], needed: int) -> None:
    for name in names:
        if not wait_until_visible(place / name, len(TRIAL)):
            raise InputError(
                f"{place / name}, written on another host, is not visible here: set output to a folder that all "
                "hosts share"
            )
    if needed > (free := shutil.disk_usage(place).free):
        raise InputError(
            f"{folder} has {free / 1e6:,.1f} MB free, a checkpoint needs {needed / 1e6:,.1f} or more: free "
            "some space, or set output to another folder"
        )
