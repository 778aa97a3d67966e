"""The state of a training in a checkpoint: copied, loaded and restored, with the parts of cputrain/checkpoint."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from cputrain.affinity.errors import InputError, Wording, as_option
from cputrain.affinity.wording import first_named
from cputrain.checkpoint.files import MODEL, OPTIMIZER, DamagedError, quarantine, rank_file
from cputrain.checkpoint.files import load_newest_intact as newest_intact
from cputrain.checkpoint.state import (
    Tensors,
    check_savable,
    copied_weights,
    load_optimizer_state,
    load_weights,
    optimizer_problem,
    optimizer_state,
    plain_name,
)
from cputrain.comm.group import all_gather
from cputrain.comm.hooks import Bf16AllReduceHook
from cputrain.manifest import EMA, LOSS, Manifest, OptimizerRecord, TrainingRecord, read_file, read_manifest
from cputrain.training.state import Learner, TrainState, mean_statistics
from cputrain.training.step import EpochMetrics

METRICS = "epoch"  # key in the header of a rank's file
RANDOM, BUFFER, RESIDUAL = "random", "buffer/", "residual/"  # names of a rank's tensors


@dataclass(slots=True, kw_only=True)
class TrainProgress:
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

    def improves(self, score: float) -> bool:
        """Return whether a score is the best so far; NaN never is."""
        return not math.isnan(score) and not score <= self.best_score

    def add_step(self, metrics: EpochMetrics) -> None:
        """Count a step and add its sums to the epoch's."""
        self.epoch.add(metrics)
        self.step += 1
        self.epoch_done = False

    def end_epoch(self) -> None:
        """Mark the epoch as logged and reset its sums for the next one."""
        self.epoch, self.epoch_s, self.epoch_done = EpochMetrics(), 0.0, True

    def metadata(self) -> dict[str, str]:
        """Return this rank's sums for the header of its file."""
        return {METRICS: json.dumps({**asdict(self.epoch), "seconds": self.epoch_s})}


def progress_of(step: int, record: TrainingRecord, headers: Iterable[Mapping[str, str]]) -> TrainProgress:
    """Return the progress of a checkpoint; `headers` are of the files of the ranks whose sums this rank continues."""
    progress = TrainProgress(
        step=step,
        best_score=math.nan if record.best_score is None else record.best_score,
        epoch_done=record.epoch_done,
        first_loss=record.first_loss,
        diverged=record.diverged,
        rollbacks=dict(record.rollbacks),
    )
    for header in headers if not record.epoch_done else ():
        sums = json.loads(header[METRICS])
        progress.epoch_s = max(progress.epoch_s, sums.pop("seconds"))
        progress.epoch.add(EpochMetrics(**sums))
    return progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Copies of the tensors that one rank writes, by file name; `optimizer` has its other values, on rank 0 only."""

    files: dict[str, Tensors]
    optimizer: OptimizerRecord | None


def take_snapshot(state: TrainState, rank: int, optimizer_name: str) -> Snapshot:
    """Copy the state. All ranks must call this: the weights' file gets the batch-norm statistics averaged over ranks,
    each rank's file its own statistics."""
    means = {id(statistic): mean for statistic, mean in mean_statistics(state.learner)}
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
    tensors = {RANDOM: torch.get_rng_state()}
    tensors |= {f"{BUFFER}{name}": buffer.clone() for name, buffer in state.learner.all_buffers().items()}
    if isinstance(state.all_reduce, Bf16AllReduceHook):
        residuals = state.all_reduce.residuals
        weights = state.learner.weights().items()
        tensors |= {f"{RESIDUAL}{name}": residuals[weight].clone() for name, weight in weights if weight in residuals}
    return tensors


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
        value = saved.get(f"{BUFFER}{name}")
        if value is not None and value.shape == buffer.shape:
            buffer.copy_(value)
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
    """Verified content of a checkpoint for one rank: shared `files` by name, `rank_tensors` of its own, and the
    progress.

    `same_ranks` is True if the same number of ranks wrote it. `damaged` maps newer checkpoints to their problems.
    """

    path: Path
    manifest: Manifest
    files: dict[str, Tensors]
    rank_tensors: Tensors
    progress: TrainProgress
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
    newest = newest_intact(folder, lambda path: load(path, rank, ranks), all_gather, remedy)
    return replace(newest[0], damaged=newest[1]) if newest else None


def load(path: Path, rank: int, world_size: int) -> Loaded:
    """Read and verify a checkpoint for one of `world_size` ranks. Raises DamagedError, or InputError if it is not a
    checkpoint."""
    manifest = read_manifest(path)
    shared = (MODEL, EMA, LOSS, OPTIMIZER)
    files = {name: read_file(path, manifest, name)[0] for name in shared if name in manifest.files}
    writers = manifest.scale.workers
    rank_tensors, _ = read_file(path, manifest, rank_file(rank % writers))
    headers = (read_file(path, manifest, rank_file(writer))[1] for writer in range(rank, writers, world_size))
    try:
        progress = progress_of(manifest.step, manifest.training, headers)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise DamagedError(f"{path} is damaged: a rank's file has no valid sums of the epoch") from None
    same_ranks = writers == world_size
    return Loaded(
        path=path,
        manifest=manifest,
        files=files,
        rank_tensors=rank_tensors,
        progress=progress,
        same_ranks=same_ranks,
    )


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
    load_rank_state(
        where, loaded.rank_tensors, state, same_ranks=loaded.same_ranks, own_statistics=training.own_statistics
    )
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
