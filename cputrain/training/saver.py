"""What is saved when, written in a thread while the training goes on.

Every rank's state is of the same step. Each rank writes its files, rank 0 the rest when all are there, and afterwards
how the evaluation has ended.
"""

import math
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cputrain import __version__
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.kernel.binding import bind_thread
from cputrain.checkpoints import (
    FileRecord,
    Manifest,
    NetworkRecord,
    OptimizerRecord,
    ScaleRecord,
    TrainingRecord,
    manifest_text,
    name_of,
    partial_name,
    put_in_place,
    rank_file,
    remove_old,
    set_best,
    write_manifest,
    write_tensors,
)
from cputrain.comm.store import SignedKeys
from cputrain.recipe.loading import with_absolute_paths
from cputrain.recipe.schema import OWN_SAMPLES
from cputrain.runs.names import CHECKPOINTS
from cputrain.training.log import TrainingLog
from cputrain.training.restore import Position, Snapshot, optimizer_record, take_snapshot
from cputrain.training.session import Session
from cputrain.training.step import TrainState

POLL_S = 0.05
WRITTEN_S = 600.0  # until a rank has written its files, after rank 0 has
VISIBLE_S = 60.0  # until a file of another host has to be seen: network file systems keep listings for a while


@dataclass(slots=True, kw_only=True)
class CheckpointWriter:
    """Writes checkpoints into a folder, one at a time, in a thread on the PUs `pus`. To be used alike by all ranks."""

    folder: Path
    keys: SignedKeys
    rank: int
    world_size: int
    keep: int
    pus: Collection[int]
    _count: int = 0
    _thread: threading.Thread | None = None
    _error: Exception | None = None
    _manifest: Manifest | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank's part of a checkpoint, on rank 0 a whole checkpoint, is being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, step: int, snapshot: Snapshot, metadata: dict[str, str], manifest: Manifest | None) -> None:
        """Write a checkpoint, after the one before; `manifest`, on rank 0, still lacks its files."""
        self._count += 1
        number = self._count

        def work() -> None:
            sums = self._write_files(step, snapshot, metadata)
            if manifest is None:
                own = sums[rank_file(self.rank)]
                self.keys.set(_key(self.rank, number), f"{number} {own.bytes} {own.crc32c}")
            else:
                self._complete(step, manifest, sums, number)

        self.wait()
        self._start(work)

    def check(self) -> None:
        """Raise what has gone wrong in the background."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until what was begun is written; raises what has gone wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def amend(self, change: Callable[[Manifest], Manifest], *, best: bool) -> None:
        """Change the manifest of the checkpoint that was begun last, on rank 0, as soon as it is written; `best` makes
        it the best one."""

        def work() -> None:
            assert self._manifest is not None
            self._manifest = change(self._manifest)
            path = self.folder / name_of(self._manifest.step)
            write_manifest(path, self._manifest)
            if best:
                set_best(path)

        self._start(work)

    def _start(self, work: Callable[[], None]) -> None:
        """Do it in a thread, after what was started before."""
        before = self._thread

        def guarded() -> None:
            if before is not None:
                before.join()
            if self._error is not None:
                return
            try:
                bind_thread(tuple(self.pus))
                work()
            except Exception as error:  # noqa: BLE001  raised again where the training notices it
                self._error = error

        self._thread = threading.Thread(target=guarded, name="cputrain-checkpoint", daemon=True)
        self._thread.start()

    def _write_files(self, step: int, snapshot: Snapshot, metadata: dict[str, str]) -> dict[str, FileRecord]:
        partial = self.folder / partial_name(step)
        partial.mkdir(parents=True, exist_ok=True)
        names, sums = list(snapshot.files), {}
        try:
            for name in names:  # each file's copies go as soon as it is written
                text = metadata if name == rank_file(self.rank) else {}
                sums[name] = write_tensors(partial / name, snapshot.files.pop(name), text)
        except OSError:
            for name in names:  # on a full disk, room for what is still to be logged
                (partial / name).unlink(missing_ok=True)
            if self.world_size == 1:  # else another rank may be about to write into it: the next start removes it
                with suppress(OSError):
                    partial.rmdir()
            raise
        return sums

    def _complete(self, step: int, manifest: Manifest, sums: dict[str, FileRecord], number: int) -> None:
        partial = self.folder / partial_name(step)
        for rank in range(1, self.world_size):
            sums[rank_file(rank)] = found = self._await(rank, number)
            self._await_file(partial / rank_file(rank), rank, found.bytes)
        self._manifest = manifest.model_copy(update={"files": sums})
        write_manifest(partial, self._manifest)
        put_in_place(partial, self.folder / name_of(step))
        remove_old(self.folder, self.keep)

    def _await(self, rank: int, number: int) -> FileRecord:
        """The size and checksum of a rank's file of this checkpoint. A rank that cannot write one ends the job; one
        whose word is lost would leave the training waiting here."""
        deadline = time.monotonic() + WRITTEN_S
        while True:
            words = (self.keys.get(_key(rank, number)) or "0").split()
            if int(words[0]) == number:
                return FileRecord(bytes=int(words[1]), crc32c=int(words[2]))
            if time.monotonic() > deadline:
                raise RunError(
                    f"rank {rank} has not written its part of a checkpoint after {WRITTEN_S:g} s: look for a "
                    "slow disk on its host, or for others who write into the job's store"
                )
            time.sleep(POLL_S)

    def _await_file(self, path: Path, rank: int, size: int) -> None:
        deadline = time.monotonic() + VISIBLE_S
        while not path.is_file() or path.stat().st_size != size:
            if time.monotonic() > deadline:
                raise RunError(
                    f"rank {rank} has written {path} on its host, but it is not here: set output to a folder that all "
                    "hosts share"
                )
            time.sleep(POLL_S)


def _key(rank: int, number: int) -> str:
    """Two keys for each rank: one may have written its part of a checkpoint before rank 0 has completed the one before,
    and then waits for rank 0 in the next step."""
    return f"saved/{rank}/{number % 2}"


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
            keys=session.group.keys,
            rank=session.rank.rank,
            world_size=session.rank.world_size,
            keep=session.recipe.checkpoint.keep,
            pus=session.context.loader_pus,
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
        rank = self.session.rank.rank
        snapshot = take_snapshot(self.state, rank, self.session.recipe.optim.name)
        manifest = None
        if snapshot.optimizer is not None:
            manifest = self._manifest(position, snapshot.optimizer)
        self.writer.begin(position.step, snapshot, position.metadata(), manifest)
        self._unlogged = position.step, False

    def try_out(self, position: Position) -> None:
        """Make checkpoint.json in memory: what it cannot hold would end the training at its first checkpoint. Raises
        InputError."""
        if not self.session.is_main_rank:
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
        if not self.session.is_main_rank:
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
            self.log.checkpoint(step, best=best)
            self._unlogged = None

    def _manifest(self, position: Position, optimizer: OptimizerRecord) -> Manifest:
        session = self.session
        recipe, data = session.recipe, session.data
        network = NetworkRecord(
            model={} if recipe.data.path == OWN_SAMPLES else recipe.model.model_dump(mode="json", by_alias=True),
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
            winograd=self.state.winograd,
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
