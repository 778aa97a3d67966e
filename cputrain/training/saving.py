"""Save and restore the state of a training, with the parts of cputrain/checkpoint.

All ranks save after the same step. Rank 0 later adds the result of the evaluation.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from cputrain import __version__
from cputrain.affinity.errors import InputError, Wording, as_option
from cputrain.affinity.filesystem import write_bytes
from cputrain.affinity.kernel.binding import bind_thread
from cputrain.affinity.wording import first_named
from cputrain.checkpoint.files import MODEL, OPTIMIZER, DamagedError, content_text, rank_file
from cputrain.checkpoint.folder import load_newest as newest_intact
from cputrain.checkpoint.folder import quarantine
from cputrain.checkpoint.state import (
    check_savable,
    copied_weights,
    load_optimizer_state,
    load_weights,
    optimizer_problem,
    optimizer_state,
    plain_name,
)
from cputrain.checkpoint.tree import Tensors
from cputrain.checkpoint.writer import CheckpointWriter, seen
from cputrain.comm.group import all_gather, run_on_main_rank
from cputrain.comm.hooks import Bf16AllReduceHook
from cputrain.files import CHECKPOINTS
from cputrain.manifest import (
    EMA,
    LOSS,
    Manifest,
    NetworkRecord,
    OptimizerRecord,
    TrainingRecord,
    first_error,
    read_file,
    read_manifest,
)
from cputrain.recipe.loading import with_absolute_paths
from cputrain.recipe.schema import USER_SAMPLES
from cputrain.recipe.workload import state_copies
from cputrain.training.log import TrainingLog
from cputrain.training.session import Session
from cputrain.training.state import Learner, TrainState, mean_statistics
from cputrain.training.step import EpochMetrics

METRICS = "epoch"  # key in the header of a rank's file


@dataclass(slots=True, kw_only=True)
class Position:
    """Progress of a training: `step` is the number of completed steps, `best_score` the best Accuracy.score so far.

    `epoch` has this rank's sums over the steps of the current epoch, `epoch_s` the seconds of these steps.
    `epoch_done` is True if the epoch that ends with this step has been evaluated and logged. `first_loss` and
    `diverged` are the state of DivergenceCheck; `rollbacks` counts the rollbacks to each checkpoint.
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
        """Mark the epoch as logged and reset its sums for the next one."""
        self.epoch, self.epoch_s, self.epoch_done = EpochMetrics(), 0.0, True

    def metadata(self) -> dict[str, str]:
        """Return this rank's sums for the header of its file."""
        return {METRICS: json.dumps({**asdict(self.epoch), "seconds": self.epoch_s})}


def position_of(step: int, record: TrainingRecord, headers: Iterable[Mapping[str, str]]) -> Position:
    """Return the position of a checkpoint; `headers` are of the files of the ranks whose sums this rank continues."""
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


RANDOM, BUFFER, RESIDUAL = "random", "buffer/", "residual/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Copies of the tensors that one rank writes, by file name; `optimizer` has its other values, on rank 0 only."""

    files: dict[str, Tensors]
    optimizer: OptimizerRecord | None


def take_snapshot(state: TrainState, rank: int, optimizer_name: str) -> Snapshot:
    """Copy the state. All ranks must call this: the weights' file gets the batch-norm statistics averaged over ranks,
    each rank's file its own statistics."""
    means = {id(own): mean for own, mean in mean_statistics(state.learner)}
    files = {rank_file(rank): _rank_state(state)}
    if rank > 0:
        return Snapshot(files=files, optimizer=None)
    files[MODEL] = copied_weights(state.network, means)
    if state.learner.loss_module is not None:
        files[LOSS] = copied_weights(state.learner.loss_module, means)
    if state.averages is not None:
        averaged = _averages_by_name(state.network, state.averages)
        files[EMA] = {name: averaged.get(name, value).clone() for name, value in files[MODEL].items()}
    _, of_weights = optimizer_state(state.optimizer, _names_of(state.learner))
    files[OPTIMIZER] = {
        f"{name}/{key}": value.detach().clone()
        for name, entries in of_weights.items()
        for key, value in entries.items()
        if isinstance(value, Tensor)
    }
    return Snapshot(files=files, optimizer=optimizer_record(state.optimizer, state.learner, optimizer_name))


def _averages_by_name(network: nn.Module, averages: Tensors) -> Tensors:
    """Return the averages under all names of their parameters: tied weights have two."""
    named = [(plain_name(name), weight) for name, weight in network.named_parameters(remove_duplicate=False)]
    first = {id(weight): averages[name] for name, weight in named if name in averages}
    return {name: first[id(weight)] for name, weight in named if id(weight) in first}


def _names_of(learner: Learner) -> dict[int, str]:
    return {id(weight): name for name, weight in learner.weights().items()}


def _rank_state(state: TrainState) -> Tensors:
    """Copy the state that differs between ranks: random number generator, buffers, and rounding errors of compressed
    gradients (in the memory order of the weights)."""
    own = {RANDOM: torch.get_rng_state()}
    own |= {f"{BUFFER}{name}": buffer.clone() for name, buffer in state.learner.all_buffers().items()}
    if isinstance(state.all_reduce, Bf16AllReduceHook):
        kept = state.all_reduce.residuals
        weights = state.learner.weights().items()
        own |= {f"{RESIDUAL}{name}": kept[weight].clone() for name, weight in weights if weight in kept}
    return own


def optimizer_record(optimizer: Optimizer, learner: Learner, kind: str) -> OptimizerRecord:
    """Return an optimizer's options and non-tensor state; its tensors are in its file as "PARAMETER/KEY"."""
    groups, of_weights = optimizer_state(optimizer, _names_of(learner))
    values = {
        name: plain
        for name, entries in of_weights.items()
        if (plain := {key: value for key, value in entries.items() if not isinstance(value, Tensor)})
    }
    return OptimizerRecord(name=kind, groups=tuple(groups), values=values)


def lacks_buffers(network: nn.Module, loaded: "Loaded") -> bool:
    """Return whether a checkpoint has tensors that the network lacks before its first forward pass."""
    return bool(loaded.files[MODEL].keys() - set(map(plain_name, network.state_dict())))


def load_optimizer(where: str, record: OptimizerRecord, saved: Tensors, state: TrainState, kind: str) -> None:
    """Load the optimizer's state. Raises InputError if the optimizer or its parameters differ from the checkpoint's."""
    if record.name != kind:
        raise InputError(
            f"checkpoint {where} was saved with optim.name={record.name}, not {kind}: set optim.name={record.name}"
        )
    weights = state.learner.weights()
    if optimizer_problem(state.optimizer, record.groups, _names_of(state.learner)):
        raise InputError(
            f"checkpoint {where} was saved with other trainable parameters: restore model.freeze_to and model.name"
        )
    entries: dict[str, dict[str, Any]] = {name: dict(values) for name, values in record.values.items()}
    for place, value in saved.items():
        name, _, key = place.rpartition("/")
        if name not in weights:
            raise InputError(f"checkpoint {where} has optimizer state for {name[:60]!r}, which is not in the network")
        entries.setdefault(name, {})[key] = value
    load_optimizer_state(state.optimizer, record.groups, entries, weights)


def load_rank_state(where: str, saved: Tensors, state: TrainState, *, same_ranks: bool, own_statistics: bool) -> None:
    """Load a rank's random state from checkpoint `where` and, if the number of ranks is unchanged, its statistics and
    rounding errors. Raises InputError if they do not fit this network or this torch."""
    random = saved.get(RANDOM, torch.empty(0))
    if (random.shape, random.dtype) != ((now := torch.get_rng_state()).shape, now.dtype):
        raise InputError(f"checkpoint {where} has no random state that this torch can load: restore it from a copy")
    torch.set_rng_state(random.clone())
    if same_ranks and own_statistics:
        _load_buffers(where, saved, state.learner)
    state.all_reduce.reset()
    if same_ranks and isinstance(state.all_reduce, Bf16AllReduceHook):
        weights = state.learner.weights()
        for place, value in saved.items():
            if place.startswith(RESIDUAL):
                state.all_reduce.residuals[weights[place.removeprefix(RESIDUAL)]] = value.clone()


def _load_buffers(where: str, saved: Tensors, learner: Learner) -> None:
    """Load this rank's buffers. A non-persistent buffer whose shape has changed is skipped: the network rebuilds it,
    such as a cache that grows."""
    persistent = {f"{prefix}{plain_name(name)}" for prefix, part in learner.parts for name in part.state_dict()}
    for name, buffer in learner.all_buffers().items():
        found = saved.get(f"{BUFFER}{name}")
        if found is not None and found.shape == buffer.shape:
            buffer.copy_(found)
        elif name in persistent:
            shape = tuple(buffer.shape)
            raise InputError(f"checkpoint {where} has no {name} of shape {shape}: restore it from a copy")


def check_learner(learner: Learner) -> None:
    """Raise InputError if checkpoints cannot store the state of network and loss, before training time is spent on
    it."""
    states = {f"{prefix}{name}": value for prefix, part in learner.parts for name, value in part.state_dict().items()}
    check_savable({**states, **learner.all_buffers()}, "network")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Verified content of a checkpoint for one rank: shared `files` by name, the rank's `own` tensors, the position.

    `same_ranks` is True if the same number of ranks wrote it. `damaged` maps newer checkpoints to their problems.
    """

    path: Path
    manifest: Manifest
    files: dict[str, Tensors]
    own: Tensors
    position: Position
    same_ranks: bool
    damaged: dict[str, str] = field(default_factory=dict)


def rename_damaged(loaded: Loaded, warn: Callable[[int, str], None], step: int, rank: int) -> None:
    """Rename the damaged checkpoints, so that they are ignored from now on, and warn which one is used instead. All
    ranks must call this."""
    for name, problem in loaded.damaged.items():
        if rank == 0:
            quarantine(loaded.path.with_name(name))
        warn(step, f"{problem}; renamed to {name}.damaged, using {loaded.path.name}")


def load_newest(folder: Path, rank: int, wording: Wording = as_option) -> Loaded | None:
    """Load the newest checkpoint that every rank can read, or return None if there are no checkpoints. All ranks must
    call this.

    Raises InputError if all are damaged, or one is of another version; `wording` spells the remedy.
    """
    ranks, remedy = dist.get_world_size(), f"start again with {wording('overwrite', 'true')}"
    found = newest_intact(folder, lambda path: load(path, rank, ranks), all_gather, remedy)
    return replace(found[0], damaged=found[1]) if found else None


def load(path: Path, rank: int, world_size: int) -> Loaded:
    """Read and verify a checkpoint for one of `world_size` ranks. Raises DamagedError, or InputError if it is not a
    checkpoint."""
    manifest = read_manifest(path)
    shared = (MODEL, EMA, LOSS, OPTIMIZER)
    files = {name: read_file(path, manifest, name)[0] for name in shared if name in manifest.files}
    writers = manifest.scale.workers
    own, _ = read_file(path, manifest, rank_file(rank % writers))
    mine = (read_file(path, manifest, rank_file(each))[1] for each in range(rank, writers, world_size))
    try:
        position = position_of(manifest.step, manifest.training, mine)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise DamagedError(f"{path} is damaged: a rank's file has no valid sums of the epoch") from None
    same_ranks = writers == world_size
    return Loaded(path=path, manifest=manifest, files=files, own=own, position=position, same_ranks=same_ranks)


def restore(loaded: Loaded, state: TrainState, optimizer_name: str) -> list[str]:
    """Restore weights, moving average, loss, optimizer, random state and statistics; return lines about a loss's
    buffers that the checkpoint changes. Raises InputError if the checkpoint is of another network, loss or optimizer.
    """
    training, where = loaded.manifest.training, str(loaded.path)
    if state.averages is not None:
        if EMA not in loaded.files:
            raise InputError(f"checkpoint {where} has no moving average of the weights: set ema_decay=null")
        load_weights(where, loaded.files[EMA], state.network)
        weights = state.learner.weights()
        with torch.no_grad():
            for name, average in state.averages.items():
                average.copy_(weights[name])
    load_weights(where, loaded.files[MODEL], state.network)
    notes = _load_loss(where, loaded.files.get(LOSS), state.learner.loss_module)
    load_optimizer(where, training.optimizer, loaded.files[OPTIMIZER], state, optimizer_name)
    load_rank_state(where, loaded.own, state, same_ranks=loaded.same_ranks, own_statistics=training.own_statistics)
    return notes


def _load_loss(where: str, saved: Tensors | None, loss: nn.Module | None) -> list[str]:
    """Load the loss's parameters and buffers; return a line about buffers that had other values, such as weights of
    classes that the script has changed."""
    if (saved is None) != (loss is None):
        have, has = ("no ", "a") if saved is None else ("", "none")
        raise InputError(
            f"checkpoint {where} has {have}parameters or buffers of a loss, and this training {has}: use the same loss"
        )
    if saved is None or loss is None:
        return []
    buffers = {plain_name(name): value for name, value in loss.named_buffers()}
    changed = [name for name, value in buffers.items() if name in saved and not torch.equal(saved[name], value)]
    load_weights(where, saved, loss)
    return [f"buffers of the loss have the checkpoint's values: {first_named(changed)}"] if changed else []


def load_eval_model(path: Path, network: nn.Module) -> int:
    """Load the weights to evaluate, the moving average if the checkpoint has one, and return the checkpoint's step.

    Raises InputError if it is not a checkpoint, damaged, or of another network.
    """
    manifest = read_manifest(path)
    load_weights(str(path), read_file(path, manifest, EMA if EMA in manifest.files else MODEL)[0], network)
    return manifest.step


TRIAL = ".trial.partial"


def try_out(folder: Path, rank: int, needed: int, *, first_on_host: bool) -> None:
    """Check that every host can write into the folder, that rank 0 sees these files, and that `needed` bytes are
    free; local rank 0 of each host writes. Raises InputError on every rank."""
    place, problem = folder / TRIAL, ""
    mine = place / rank_file(rank)
    if first_on_host:
        try:
            write_bytes(mine, TRIAL.encode())
        except OSError as error:
            problem = f"rank {rank} cannot write into {folder}: {error.strerror}"
    tries = all_gather((problem, rank_file(rank) if first_on_host else None))
    try:
        if problems := [each for each, _ in tries if each]:
            raise InputError(f"{problems[0]}: set output to a folder to which all hosts can write")
        run_on_main_rank(lambda: _check_trial(folder, place, [name for _, name in tries if name], needed))
    finally:
        with suppress(OSError):  # not empty while other ranks' files exist: the last rank removes the folder
            mine.unlink(missing_ok=True)
            place.rmdir()


def _check_trial(folder: Path, place: Path, names: Sequence[str], needed: int) -> None:
    for name in names:
        if not seen(place / name, len(TRIAL)):
            raise InputError(
                f"{place / name}, written on another host, is not visible here: set output to a folder that all "
                "hosts share"
            )
    if needed > (free := shutil.disk_usage(place).free):
        raise InputError(
            f"{folder} has {free / 1e6:,.1f} MB free, a checkpoint needs {needed / 1e6:,.1f} or more: free "
            "some space, or set output to another folder"
        )


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

    def save(self, position: Position) -> None:
        """Start to save this step. Only waits for the previous checkpoint, then copies the state."""
        self.wait()
        self._began = time.monotonic()
        rank = self.session.rank.rank
        snapshot = take_snapshot(self.state, rank, self.session.recipe.optim.name)
        content = None
        if snapshot.optimizer is not None:
            content = self._manifest(position, snapshot.optimizer).model_dump(mode="json")
        self.writer.begin(position.step, snapshot.files, position.metadata(), content)
        self._unlogged = position.step, False

    def try_out(self, position: Position) -> None:
        """Check before training that checkpoints can be saved: build checkpoint.json in memory and test the folder.
        All ranks must call this. Raises InputError on every rank."""
        run_on_main_rank(lambda: self._try_manifest(position))
        averages = 1 if self.state.averages is None else 2
        weights = sum(value.nbytes for value in self.state.network.state_dict().values())
        trained = sum(value.nbytes for value in self.state.learner.trained().values())
        needed = averages * weights + state_copies(self.session.recipe.optim) * trained
        rank = self.session.rank
        try_out(self.writer.folder, rank.rank, needed, first_on_host=rank.local_rank == 0)

    def _try_manifest(self, position: Position) -> None:
        try:
            record = optimizer_record(self.state.optimizer, self.state.learner, self.session.recipe.optim.name)
            content_text(self._manifest(position, record).model_dump(mode="json"))
        except ValidationError as error:
            place, first = first_error(error)
            found = f"{place}={first['input']!r} ({first['msg']})"
            raise InputError(f"checkpoints cannot store {found}: set another value") from None
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

    def finish(self, position: Position, *, best: bool) -> None:
        """Record in this step's checkpoint that its epoch is evaluated and logged, and whether it is the best."""
        if not self.session.is_main_rank:
            return
        ends_epoch = position.step % self.session.sizes.steps_per_epoch == 0
        score = None if math.isnan(position.best_score) else position.best_score

        def change(content: dict[str, Any]) -> dict[str, Any]:
            # If max_steps ended the training within an epoch, a longer one continues with each rank's own statistics.
            now = {"epoch_done": ends_epoch, "own_statistics": not ends_epoch, "best_score": score}
            return {**content, "training": {**content["training"], **now}}

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
            model={} if recipe.data.path == USER_SAMPLES else recipe.model.model_dump(mode="json", by_alias=True),
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
            winograd=None if self.state.winograd is None else tuple(self.state.winograd),
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
            scale=session.scale,
            training=training,
            recipe=values,
            files={},
        )
