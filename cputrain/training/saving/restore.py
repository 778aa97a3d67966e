"""Finding the newest checkpoint that every rank can read, and putting its state back."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import nn

from affinity.errors import InputError
from affinity.wording import counted
from cputrain.checkpoints.folder import list_checkpoints, set_aside
from cputrain.checkpoints.manifest import (
    EMA,
    MODEL,
    OPTIMIZER,
    DamagedError,
    Manifest,
    rank_file,
    read_manifest,
)
from cputrain.checkpoints.tensors import read_file
from cputrain.comm.group import all_gather
from cputrain.training.saving.position import Position, position_of
from cputrain.training.saving.snapshot import Tensors, put_optimizer, put_own_state, put_weights
from cputrain.training.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint's verified content for one rank: `files` by name, `own` of its own file, and its position.

    `same_ranks`: as many ranks as now have written it.
    """

    path: Path
    manifest: Manifest
    files: dict[str, Tensors]
    own: Tensors
    position: Position
    same_ranks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest good checkpoint, and what is wrong with the newer ones, by name."""

    loaded: Loaded
    damaged: dict[str, str]

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self.loaded.path.name


def set_damaged_aside(found: Found, warn: Callable[[int, str], None], step: int, rank: int) -> None:
    """Rename the damaged checkpoints, so that they count no more, and tell which one takes their place. To be called by
    all ranks."""
    for name, problem in found.damaged.items():
        if rank == 0:
            set_aside(found.loaded.path.with_name(name))
        warn(step, f"{problem}: it is now {name}.damaged, and {found.name} is used")


def find_newest(folder: Path, rank: int) -> Found | None:
    """The newest checkpoint that every rank can read; None where there is none at all. To be called by all ranks.

    Raises InputError where all are damaged, or one is of another version.
    """
    names = all_gather([path.name for path in list_checkpoints(folder)])[0]
    damaged: dict[str, str] = {}
    for name in reversed(names):
        problem, loaded = "", None
        try:
            loaded = load(folder / name, rank, dist.get_world_size())
        except DamagedError as error:
            problem = str(error)
        problems = [each for each in all_gather(problem) if each]
        if loaded is not None and not problems:
            return Found(loaded=loaded, damaged=damaged)
        damaged[name] = problems[0]
    if damaged:
        count, newest = counted(len(damaged), "checkpoint"), next(iter(damaged.values()))
        raise InputError(
            f"none of the {count} in {folder} can be used, the newest because {newest}: put back a copy of one, or "
            "start again with --overwrite"
        )
    return None


def load(path: Path, rank: int, world_size: int) -> Loaded:
    """A checkpoint's files for one of `world_size` ranks. Raises DamagedError, InputError for what is no checkpoint."""
    manifest = read_manifest(path)
    files = {name: read_file(path, manifest, name)[0] for name in (MODEL, EMA, OPTIMIZER) if name in manifest.files}
    writers = manifest.scale.workers
    own, _ = read_file(path, manifest, rank_file(rank % writers))
    mine = (read_file(path, manifest, rank_file(each))[1] for each in range(rank, writers, world_size))
    try:
        position = position_of(manifest.step, manifest.training, mine)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise DamagedError(f"{path} is damaged: a rank's file lacks its sums of the epoch") from None
    same_ranks = writers == world_size
    return Loaded(path=path, manifest=manifest, files=files, own=own, position=position, same_ranks=same_ranks)


def put_back(loaded: Loaded, state: TrainState, optimizer_name: str) -> None:
    """Restore weights, moving average, optimizer, random numbers and statistics. Raises InputError where the checkpoint
    is of another network or optimizer."""
    training, where = loaded.manifest.training, str(loaded.path)
    put_weights(where, loaded.files[MODEL], state.network)
    if state.ema_model is not None:
        if EMA not in loaded.files:
            raise InputError(f"checkpoint {where} has no moving average: it was trained with ema_decay=null, set it so")
        put_weights(where, loaded.files[EMA], state.ema_model)
    put_optimizer(where, training.optimizer, loaded.files[OPTIMIZER], state, optimizer_name)
    put_own_state(where, loaded.own, state, same_ranks=loaded.same_ranks, own_statistics=training.own_statistics)


def load_eval_model(path: Path, network: nn.Module) -> int:
    """Restore the weights to evaluate, of the moving average if the checkpoint has one; return the steps done.

    Raises InputError for what is no checkpoint, damaged or of another network.
    """
    manifest = read_manifest(path)
    put_weights(str(path), read_file(path, manifest, EMA if EMA in manifest.files else MODEL)[0], network)
    return manifest.step
