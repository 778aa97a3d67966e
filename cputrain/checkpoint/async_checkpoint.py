"""Checkpoints in anybody's training loop: saved by a thread, restored bit for bit, in one process or on many ranks.

Every rank makes the same calls. Before anything is written or loaded, the ranks exchange what they found, so that a
problem of one is raised on all. State that is equal on all ranks is written once, by rank 0; other state by each rank.
"""

import atexit
import json
import logging
import operator
import os
import random
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from cputrain import __version__
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import refusal
from cputrain.affinity.wording import first_named, plural
from cputrain.checkpoint.files import (
    LOOP_FORMAT,
    MODEL,
    OPTIMIZER,
    TRAINER_FORMAT,
    DamagedError,
    FileRecord,
    rank_file,
    read_content,
    read_tensors,
)
from cputrain.checkpoint.folder import list_checkpoints, load_newest, quarantine, remove_partial, step_of
from cputrain.checkpoint.state import (
    Entries,
    Groups,
    check_savable,
    copied_weights,
    load_optimizer_state,
    load_weights,
    optimizer_problem,
    optimizer_state,
    plain_name,
    weights_problem,
)
from cputrain.checkpoint.tree import Tensors, decoded, encoded
from cputrain.checkpoint.writer import CheckpointWriter
from cputrain.checksums import bit_sum, crc32c_of_json

VERSION = 1
OBJECTS = "objects.safetensors"  # tensors of the state that is equal on all ranks, except weights and optimizer
STATE = "state"  # key in the header of a rank's file: its own state as JSON
# State beside the keyword arguments, whose names have no slash: buffers of the state dict, other buffers, generators.
BUFFERS, CACHES, RANDOM = "network/buffers", "network/caches", "process/random"
LEAVING_S = 60.0  # longest wait for another rank's file when a training has failed

logger = logging.getLogger("cputrain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `AsyncCheckpoint.restore` has loaded.

    step: the steps done. values: the plain values that were saved by keyword. path: the folder of this checkpoint.
    """

    step: int
    values: dict[str, Any]
    path: Path


class AsyncCheckpoint:
    """Checkpoints of a training loop, written by a thread: each is complete and verified, or not there at all.

    folder: on a file system that all hosts share; one job at a time saves there.
    keep: the number of newest checkpoints that are kept.
    With torch.distributed, all ranks make the same calls, after init_process_group, and hold replicas of the model
    (DistributedDataParallel). Use it in a `with` block, or call close(), before the group is destroyed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2) -> None:
        if keep < 1:
            raise InputError(f"keep={keep} would keep no checkpoint: set keep to 1 or more")
        self.folder, self.keep = Path(folder), keep
        self._writer: CheckpointWriter | None = None

    def save(self, step: int, model: nn.Module, optimizer: Optimizer | None = None, **objects: Any) -> None:
        """Save the state after `step` steps: copy it in memory, return, and let a thread write it.

        model: saved without the wrappers of DDP and torch.compile. objects: by keyword, what has state_dict and
        load_state_dict (a learning rate scheduler, a loader, a second model), a torch.Generator, or plain values
        (epoch=3): numbers, texts, lists, dicts, arrays, tensors. The random states of torch (CPU), NumPy and Python are
        saved, too. A checkpoint of the same step is replaced.
        Waits while the checkpoint before is still being written.
        Raises RunError if that write has failed, InputError if the state cannot be stored; on all ranks.
        """
        if (step := operator.index(step)) < 0:
            raise InputError(f"step={step} is not a number of steps that are done: count from 0")
        rank, ranks = _rank_of_ranks()
        token, state, sums = secrets.token_hex(8), None, {}
        problem: Exception | None = self._take_error()
        if problem is None:
            try:
                if rank == 0:
                    self._prepare_folder(step)
                state = _State(unwrapped(model), optimizer, objects)
                sums = {"step": step, **state.sums()} if ranks > 1 else {}
            except InputError as error:
                problem = error
            except OSError as error:
                problem = RunError(refusal(error) or str(error))
        try:
            of_ranks = _gather_or_raise(problem, (token, sums))
        except RunError:
            if rank == 0:  # every rank has stopped writing
                remove_partial(self.folder)
            raise
        assert state is not None
        differing = _differing([each for _, each in of_ranks])
        if self._writer is None:
            keys = _StoreKeys(of_ranks[0][0]) if ranks > 1 else None
            self._writer = CheckpointWriter(folder=self.folder, keys=keys, rank=rank, world_size=ranks, keep=self.keep)
            atexit.register(self._end)
        files, metadata = state.copied(rank, {RANDOM, *differing})
        content = state.content(step, ranks, {RANDOM, *differing}) if rank == 0 else None
        self._writer.begin(step, files, metadata, content)

    def restore(self, model: nn.Module, optimizer: Optimizer | None = None, **objects: Any) -> Restored | None:
        """Load the newest intact checkpoint into these objects; return its step and values, or None if there is none.

        The loop continues bit for bit with the same number of ranks. With another number, the generators stay as they
        are, and a warning says so. Without the optimizer that was saved, only the model and the objects given are
        loaded, to evaluate it.
        Damaged checkpoints are skipped with a warning, and renamed. Nothing is loaded unless everything fits.
        Raises InputError if the checkpoint is of another model, optimizer or set of objects, or if all are damaged;
        RunError if a write before has failed; on all ranks.
        """
        rank, ranks = _rank_of_ranks()
        network = unwrapped(model)
        problem: Exception | None = self._take_error()
        _gather_or_raise(problem, None)
        found = load_newest(
            self.folder,
            lambda path: _load(path, rank, ranks, wants_optimizer=optimizer is not None),
            _gather,
            "move them away to start again",
        )
        if found is None:
            return None
        loaded, damaged = found
        try:
            _check_fit(loaded, network, optimizer, objects)
        except InputError as error:
            problem = error
        _gather_or_raise(problem, None)
        whole = loaded.is_whole(optimizer)
        for name, why in damaged.items() if rank == 0 else ():
            if whole:  # this loop will save here; others only read
                quarantine(self.folder / name)
            renamed = f"renamed to {name}.damaged, " if whole else ""
            logger.warning("%s; %susing %s", why, renamed, loaded.path.name)
        _apply(loaded, network, optimizer, objects)
        if whole and loaded.same_ranks:
            _set_random_state(loaded.items[RANDOM])
        elif whole and rank == 0:
            logger.warning(
                "%s was saved by %s, this job has %d: the random generators stay as they are",
                *(loaded.path, plural(loaded.ranks, "rank"), ranks),
            )
        return Restored(step=loaded.step, values=loaded.values(), path=loaded.path)

    def close(self) -> None:
        """Wait until the last checkpoint is written. Raises RunError if it could not be."""
        atexit.unregister(self._end)
        error, self._writer = self._take_error(), None
        if error is not None:
            raise error

    def __enter__(self) -> "AsyncCheckpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            atexit.unregister(self._end)
            self._end()

    def _end(self) -> None:
        """Wait for the last checkpoint when the program ends or fails: others may be gone, and errors are logged."""
        if self._writer is not None:
            self._writer.limit_s = LEAVING_S
        if (error := self._take_error()) is not None:
            logger.error("%s", error)

    def _take_error(self) -> RunError | None:
        error = self._writer.take_error() if self._writer is not None else None
        if error is None:
            return None
        text = (refusal(error) if isinstance(error, OSError) else None) or str(error)
        failed = RunError(f"the checkpoint was not saved: {text}")
        failed.__cause__ = error
        return failed

    def _prepare_folder(self, step: int) -> None:
        """Remove what an earlier job has not finished. Raises InputError if the folder has a checkpoint that is newer
        than the one to be saved, as the loop would lose it."""
        if self._writer is None:
            remove_partial(self.folder)
        newest = next(reversed(list_checkpoints(self.folder)), None)
        if newest is not None and step_of(newest) > step:
            raise InputError(
                f"{newest} is newer than step {step}, which is to be saved: restore it first, or name another folder"
            )


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(inside := model._modules.get("_orig_mod"), nn.Module):
            model = inside
        else:
            return model


class _StoreKeys:
    """Keys in the store of the default process group, with a connection of the writer's own."""

    def __init__(self, token: str) -> None:
        self._default = dist.distributed_c10d._get_default_store()  # kept: rank 0's may serve the others
        self._store = PrefixStore(f"cputrain-checkpoint/{token}", self._default.clone())  # type: ignore[attr-defined]

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


def _rank_of_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        if dist.get_backend() == dist.Backend.MPI:
            raise InputError("checkpoints need a store, which torch's MPI backend has not: use gloo or ccl")
        return dist.get_rank(), dist.get_world_size()
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise InputError(
            f"WORLD_SIZE is {ranks} and there is no process group, so every rank would write the same files: call "
            "torch.distributed.init_process_group first"
        )
    return 0, 1


def _gather(value: Any) -> list[Any]:
    """Return the values of all ranks, ordered by rank."""
    values = [value]
    if dist.is_available() and dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def _gather_or_raise(problem: Exception | None, value: Any) -> list[Any]:
    """Return the values of all ranks; if a rank has a problem, RunError or InputError, all raise the first one."""
    text = None if problem is None else (isinstance(problem, RunError), str(problem))
    of_ranks = _gather((text, value))
    found = next((each for each, _ in of_ranks if each is not None), None)
    if found is None:
        return [each for _, each in of_ranks]
    ran, message = found
    if problem is not None and str(problem) == message:
        raise problem
    raise (RunError if ran else InputError)(message)


def _differing(sums: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of the state that is not equal on all ranks. Raises InputError if that is the step, the weights,
    the optimizer, or which objects are saved."""
    first = sums[0]
    found = set()
    for rank, own in enumerate(sums):
        if own.get("step") != first.get("step"):
            raise InputError(f"rank {rank} saves step {own['step']}, rank 0 step {first['step']}: save the same step")
        if other := sorted(own.keys() ^ first.keys()):
            raise InputError(f"{first_named(other)} is not saved by rank 0 and rank {rank}: save the same on all ranks")
        for name in ("weights", "optimizers"):
            if own.get(name) != first.get(name):
                raise InputError(
                    f"the {name} of ranks 0 and {rank} differ, and these checkpoints hold one replica, as of "
                    "DistributedDataParallel: broadcast those of rank 0, or use torch.distributed.checkpoint"
                )
        found |= {name for name in own if own[name] != first[name]}
    return found


class _State:
    """The state of a loop before it is copied: JSON and tensors of the optimizer, and of each item by name."""

    def __init__(self, network: nn.Module, optimizer: Optimizer | None, objects: Mapping[str, Any]) -> None:
        self.network, self.objects = network, [name for name, each in objects.items() if is_object(each)]
        self.weights = _parameters(network)
        check_savable({**network.state_dict(), **dict(network.named_buffers())}, "model")
        self.optimizer: dict[str, Any] | None = None
        self.optimizer_tensors: Tensors = {}
        if optimizer is not None:
            self._add_optimizer(optimizer)
        buffers = {plain_name(name): value for name, value in network.named_buffers()}
        persistent = {plain_name(name) for name in network.state_dict()}
        items = {
            BUFFERS: {name: value for name, value in buffers.items() if name in persistent},
            CACHES: {name: value for name, value in buffers.items() if name not in persistent},
            RANDOM: {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()},
            **{name: _state_dict_of(each) if is_object(each) else each for name, each in objects.items()},
        }
        self.trees: dict[str, Any] = {}
        self.tensors: dict[str, Tensors] = {name: {} for name in items}
        for name, value in items.items():
            self.trees[name] = encoded(value, name, self.tensors[name])

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        names = {id(weight): name for name, weight in self.weights.items()}
        of_it = chain(optimizer.state, *(group["params"] for group in optimizer.param_groups))
        if any(id(each) not in names for each in of_it):
            raise InputError(
                "the optimizer has a parameter that the model has not: pass a module with all that is trained, such as "
                "torch.nn.ModuleList([model, loss])"
            )
        groups, entries = optimizer_state(optimizer, names)
        self.optimizer = {
            "name": type(optimizer).__name__,
            "groups": encoded(groups, "groups", self.optimizer_tensors),
            "state": {name: encoded(each, name, self.optimizer_tensors) for name, each in entries.items()},
        }

    def sums(self) -> dict[str, Any]:
        """Return a checksum of the weights, of the optimizer and of each item."""
        return {
            "weights": _sum(sorted(self.weights), {name: each.detach() for name, each in self.weights.items()}),
            "optimizers": _sum(self.optimizer, self.optimizer_tensors),
            **{name: _sum(tree, self.tensors[name]) for name, tree in self.trees.items()},
        }

    def copied(self, rank: int, own: set[str]) -> tuple[dict[str, Tensors], dict[str, str]]:
        """Return copies of the tensors that a rank writes, by file, and the header of its own file; `own` names the
        items that each rank writes."""
        of_rank = {name: tree for name, tree in self.trees.items() if name in own}
        files = {rank_file(rank): _copies(self.tensors[name] for name in of_rank)}
        if rank == 0:
            files[MODEL] = copied_weights(self.network)
            files[OBJECTS] = _copies(self.tensors[name] for name in self._shared(own))
            if self.optimizer is not None:
                files[OPTIMIZER] = _copies([self.optimizer_tensors])
        return files, {STATE: json.dumps(of_rank)}

    def content(self, step: int, ranks: int, own: set[str]) -> dict[str, Any]:
        """Return checkpoint.json without its files."""
        return {
            "format": LOOP_FORMAT,
            "version": VERSION,
            "cputrain": __version__,
            "step": step,
            "ranks": ranks,
            "optimizer": self.optimizer,
            "objects": self.objects,
            "state": self._shared(own),
            "files": {},
        }

    def _shared(self, own: set[str]) -> dict[str, Any]:
        """Return the items that are equal on all ranks; the buffers of the state dict are in the model's file then."""
        return {name: tree for name, tree in self.trees.items() if name not in own and name != BUFFERS}


def is_object(value: Any) -> bool:
    """Whether a keyword argument of `save` is an object with a state, not a plain value."""
    return isinstance(value, torch.Generator) or hasattr(value, "load_state_dict")


def _state_dict_of(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, nn.Module):
        return {plain_name(name): each for name, each in unwrapped(value).state_dict().items()}
    return value.state_dict()


def _load_state_dict(where: str, value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, nn.Module):
        load_weights(where, state, unwrapped(value))
    else:
        value.load_state_dict(state)


def _parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return each parameter once, by its name in checkpoints."""
    return {plain_name(name): weight for name, weight in network.named_parameters()}


def _sum(tree: Any, tensors: Tensors) -> tuple[int, int]:
    """Return checksums of a state's structure and of its tensors."""
    described = {name: [str(value.dtype), list(value.shape)] for name, value in tensors.items()}
    return crc32c_of_json([tree, described]), bit_sum(tensors.values())


def _copies(of_items: Iterable[Tensors]) -> Tensors:
    return {name: value.clone() for tensors in of_items for name, value in tensors.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """Verified content of a checkpoint for one rank. `ranks` have saved it; `optimizer` has its name, groups and state
    if it has one, the latter only if it was asked for; `own` names the items that were not equal on all ranks."""

    path: Path
    step: int
    ranks: int
    same_ranks: bool
    weights: Tensors
    optimizer: tuple[str, Groups, Entries] | None
    objects: list[str]
    items: dict[str, Any]
    own: list[str]

    def is_whole(self, optimizer: Optimizer | None) -> bool:
        """Whether the loop is to continue, and not only its model to be evaluated."""
        return self.optimizer is None or optimizer is not None

    def values(self) -> dict[str, Any]:
        """Return the plain values; each rank's own ones only if there are as many ranks as then."""
        names = [name for name in self.items if "/" not in name and name not in self.objects]
        return {name: self.items[name] for name in names if self.same_ranks or name not in self.own}


def _load(path: Path, rank: int, ranks: int, *, wants_optimizer: bool) -> _Loaded:
    """Read and verify a checkpoint for one of `ranks` ranks. Raises DamagedError, or InputError if it is of another
    program or version."""
    content = read_content(path)
    try:
        kind, version = content["format"], content["version"]
    except (LookupError, TypeError):
        kind, version = None, None
    if kind == TRAINER_FORMAT:
        raise InputError(f"{path} was saved by cputrain train, which resumes it; its weights are in {path / MODEL}")
    if (kind, version) != (LOOP_FORMAT, VERSION):
        raise InputError(f"{path} is from another program, or another version of cputrain: use the one that saved it")
    try:
        return _loaded(path, content, rank, ranks, wants_optimizer=wants_optimizer)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: it is not as AsyncCheckpoint saves ({error!r})") from None


def _loaded(path: Path, content: dict[str, Any], rank: int, ranks: int, *, wants_optimizer: bool) -> _Loaded:
    def read(name: str) -> tuple[Tensors, dict[str, str]]:
        return read_tensors(path / name, FileRecord(**content["files"][name]))

    saved_by = int(content["ranks"])
    tensors, header = read(rank_file(rank % saved_by))
    own = json.loads(header[STATE])
    tensors |= read(OBJECTS)[0]
    optimizer = content["optimizer"]
    if optimizer is not None:
        of_it = read(OPTIMIZER)[0] if wants_optimizer else {}
        groups = decoded(optimizer["groups"], of_it) if wants_optimizer else []
        state = {name: decoded(each, of_it) for name, each in optimizer["state"].items()} if wants_optimizer else {}
        optimizer = str(optimizer["name"]), groups, state
    return _Loaded(
        path=path,
        step=int(content["step"]),
        ranks=saved_by,
        same_ranks=saved_by == ranks,
        weights=read(MODEL)[0],
        optimizer=optimizer,
        objects=list(content["objects"]),
        items={name: decoded(tree, tensors) for name, tree in (content["state"] | own).items()},
        own=sorted(own),
    )


def _check_fit(loaded: _Loaded, network: nn.Module, optimizer: Optimizer | None, objects: Mapping[str, Any]) -> None:
    """Raise InputError if a checkpoint does not fit these objects; nothing is loaded then."""
    where = f"checkpoint {loaded.path}"
    check_savable({**network.state_dict(), **dict(network.named_buffers())}, "model")
    modules = {"": network, **{name: unwrapped(each) for name, each in objects.items() if isinstance(each, nn.Module)}}
    for name, module in modules.items():
        if (not name or name in loaded.objects) and (
            problem := weights_problem(module, loaded.items[name] if name else loaded.weights)
        ):
            raise InputError(f"{where} has {problem}{f' ({name})' if name else ''}")
    if loaded.optimizer is None and optimizer is not None:
        raise InputError(f"{where} has no optimizer: restore without one")
    if loaded.optimizer is not None and optimizer is not None:
        kind, groups, _ = loaded.optimizer
        if kind != type(optimizer).__name__:
            raise InputError(f"{where} was saved with {kind}, not {type(optimizer).__name__}: use {kind}")
        names = {id(weight): name for name, weight in _parameters(network).items()}
        if optimizer_problem(optimizer, groups, names):
            raise InputError(f"{where} was saved with other parameters in the optimizer: give it the same groups")
    if stateless := [name for name, each in objects.items() if not is_object(each)]:
        raise InputError(f"{first_named(stateless)} has no load_state_dict: plain values are in what restore returns")
    if unknown := sorted(objects.keys() - set(loaded.objects)):
        raise InputError(f"{where} has no {first_named(unknown)}, but {first_named(loaded.objects) or 'no objects'}")
    whole = loaded.is_whole(optimizer)
    if whole and (absent := sorted(set(loaded.objects) - objects.keys())):
        raise InputError(f"{where} also has {first_named(absent)}: pass all that was saved to restore")
    own = [name for name in loaded.own if name in objects or (whole and "/" not in name)]
    if own and not loaded.same_ranks:
        raise InputError(
            f"{where} was saved by {plural(loaded.ranks, 'rank')}, each with its own {first_named(own)}: start "
            f"{plural(loaded.ranks, 'rank')}"
        )
    if whole and loaded.same_ranks and loaded.items[RANDOM]["torch"].shape != torch.get_rng_state().shape:
        raise InputError(f"{where} has random states of another version of torch: use the one that saved it")


@torch.no_grad()
def _apply(loaded: _Loaded, network: nn.Module, optimizer: Optimizer | None, objects: Mapping[str, Any]) -> None:
    """Load a checkpoint that fits."""
    where = str(loaded.path)
    load_weights(where, loaded.weights, network)
    if loaded.same_ranks:
        saved = loaded.items.get(BUFFERS, {}) | loaded.items[CACHES]
        for name, buffer in network.named_buffers():
            found = saved.get(plain_name(name))
            # A cache may have grown: the network rebuilds it. A constant may be an expanded view: it cannot be written.
            if found is not None and found.shape == buffer.shape and not torch.equal(found, buffer):
                buffer.copy_(found)
    if optimizer is not None and loaded.optimizer is not None:
        _, groups, entries = loaded.optimizer
        load_optimizer_state(optimizer, groups, entries, _parameters(network))
    for name, each in objects.items():
        _load_state_dict(where, each, loaded.items[name])


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
