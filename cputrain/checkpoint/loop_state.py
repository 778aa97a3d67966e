"""The state of anybody's training loop: collected to be copied for a checkpoint, and loaded from one if it fits.

State that is equal on all ranks is written once, by rank 0; other state by each rank.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from cputrain import __version__
from cputrain.affinity.errors import InputError
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
from cputrain.checkpoint.state import (
    Entries,
    Groups,
    Tensors,
    check_savable,
    copied_weights,
    decode_state,
    encode_state,
    load_optimizer_state,
    load_weights,
    optimizer_problem,
    optimizer_state,
    plain_name,
    weights_problem,
)
from cputrain.checksums import bit_sum, crc32c_of_json

VERSION = 1
OBJECTS = "objects.safetensors"  # tensors of the state that is equal on all ranks, except weights and optimizer
STATE = "state"  # key in the header of a rank's file: its own state as JSON
# State beside the keyword arguments, whose names have no slash: buffers of the state dict, other buffers, generators.
BUFFERS, CACHES, RANDOM = "network/buffers", "network/caches", "process/random"


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(inside := model._modules.get("_orig_mod"), nn.Module):
            model = inside
        else:
            return model


class LoopState:
    """The state of a loop before it is copied: JSON and tensors of the optimizer, and of each item by name."""

    def __init__(self, network: nn.Module, optimizer: Optimizer | None, objects: Mapping[str, Any]) -> None:
        self.network, self.objects = network, [name for name, value in objects.items() if is_object(value)]
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
            **{name: _state_dict_of(value) if is_object(value) else value for name, value in objects.items()},
        }
        self.trees: dict[str, Any] = {}
        self.tensors: dict[str, Tensors] = {name: {} for name in items}
        for name, value in items.items():
            self.trees[name] = encode_state(value, name, self.tensors[name])

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        names = {id(weight): name for name, weight in self.weights.items()}
        of_it = chain(optimizer.state, *(group["params"] for group in optimizer.param_groups))
        if any(id(weight) not in names for weight in of_it):
            raise InputError(
                "the optimizer has a parameter that the model has not: pass a module with all that is trained, such as "
                "torch.nn.ModuleList([model, loss])"
            )
        groups, entries = optimizer_state(optimizer, names)
        self.optimizer = {
            "name": type(optimizer).__name__,
            "groups": encode_state(groups, "groups", self.optimizer_tensors),
            "state": {name: encode_state(entry, name, self.optimizer_tensors) for name, entry in entries.items()},
        }

    def sums(self) -> dict[str, Any]:
        """Return a checksum of the weights, of the optimizer and of each item."""
        return {
            "weights": _sum(sorted(self.weights), {name: weight.detach() for name, weight in self.weights.items()}),
            "optimizers": _sum(self.optimizer, self.optimizer_tensors),
            **{name: _sum(tree, self.tensors[name]) for name, tree in self.trees.items()},
        }

    def copied(self, rank: int, names: set[str]) -> tuple[dict[str, Tensors], dict[str, str]]:
        """Return copies of the tensors that a rank writes, by file, and the header of its own file; `names` names the
        items that each rank writes."""
        of_rank = {name: tree for name, tree in self.trees.items() if name in names}
        files = {rank_file(rank): _copies(self.tensors[name] for name in of_rank)}
        if rank == 0:
            files[MODEL] = copied_weights(self.network)
            files[OBJECTS] = _copies(self.tensors[name] for name in self._shared(names))
            if self.optimizer is not None:
                files[OPTIMIZER] = _copies([self.optimizer_tensors])
        return files, {STATE: json.dumps(of_rank)}

    def content(self, step: int, ranks: int, names: set[str]) -> dict[str, Any]:
        """Return checkpoint.json without its files."""
        return {
            "format": LOOP_FORMAT,
            "version": VERSION,
            "cputrain": __version__,
            "step": step,
            "ranks": ranks,
            "optimizer": self.optimizer,
            "objects": self.objects,
            "state": self._shared(names),
            "files": {},
        }

    def _shared(self, names: set[str]) -> dict[str, Any]:
        """Return the items that are equal on all ranks; the buffers of the state dict are in the model's file then."""
        return {name: tree for name, tree in self.trees.items() if name not in names and name != BUFFERS}


def differing_state(sums: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of the state that is not equal on all ranks. Raises InputError if that is the step, the weights,
    the optimizer, or which objects are saved."""
    first = sums[0]
    differing = set()
    for rank, sums_of_rank in enumerate(sums):
        if sums_of_rank.get("step") != first.get("step"):
            raise InputError(
                f"rank {rank} saves step {sums_of_rank['step']}, rank 0 step {first['step']}: save the same step"
            )
        if names := sorted(sums_of_rank.keys() ^ first.keys()):
            raise InputError(f"{first_named(names)} is not saved by rank 0 and rank {rank}: save the same on all ranks")
        for name in ("weights", "optimizers"):
            if sums_of_rank.get(name) != first.get(name):
                raise InputError(
                    f"the {name} of ranks 0 and {rank} differ, and these checkpoints hold one replica, as of "
                    "DistributedDataParallel: broadcast those of rank 0, or use torch.distributed.checkpoint"
                )
        differing |= {name for name in sums_of_rank if sums_of_rank[name] != first[name]}
    return differing


def is_object(value: Any) -> bool:
    """Whether a keyword argument of `save` is an object with a state, not a plain value."""
    return isinstance(value, torch.Generator) or hasattr(value, "load_state_dict")


def _state_dict_of(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, nn.Module):
        return {plain_name(name): tensor for name, tensor in unwrapped(value).state_dict().items()}
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
class LoadedState:
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


def load_state(path: Path, rank: int, ranks: int, *, wants_optimizer: bool) -> LoadedState:
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
        return _verified(path, content, rank, ranks, wants_optimizer=wants_optimizer)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: it is not as AsyncCheckpoint saves ({error!r})") from None


def _verified(path: Path, content: dict[str, Any], rank: int, ranks: int, *, wants_optimizer: bool) -> LoadedState:
    def read(name: str) -> tuple[Tensors, dict[str, str]]:
        return read_tensors(path / name, FileRecord(**content["files"][name]))

    saved_by = int(content["ranks"])
    tensors, header = read(rank_file(rank % saved_by))
    names = json.loads(header[STATE])
    tensors |= read(OBJECTS)[0]
    optimizer = content["optimizer"]
    if optimizer is not None and wants_optimizer:
        of_it = read(OPTIMIZER)[0]
        groups = [dict(decode_state(group, of_it)) for group in optimizer["groups"]]
        entries = {name: dict(decode_state(entry, of_it)) for name, entry in optimizer["state"].items()}
        optimizer = str(optimizer["name"]), groups, entries
    elif optimizer is not None:
        optimizer = str(optimizer["name"]), [], {}
    objects, items = list(content["objects"]), content["state"] | names
    if absent := {CACHES, RANDOM, *objects} - items.keys():
        raise LookupError(*absent)
    return LoadedState(
        path=path,
        step=int(content["step"]),
        ranks=saved_by,
        same_ranks=saved_by == ranks,
        weights=read(MODEL)[0],
        optimizer=optimizer,
        objects=objects,
        items={name: decode_state(tree, tensors) for name, tree in items.items()},
        own=sorted(names),
    )


def check_objects_fit(
    loaded: LoadedState, network: nn.Module, optimizer: Optimizer | None, objects: Mapping[str, Any]
) -> None:
    """Raise InputError if a checkpoint does not fit these objects; nothing is loaded then."""
    where = f"checkpoint {loaded.path}"
    check_savable({**network.state_dict(), **dict(network.named_buffers())}, "model")
    modules = {
        "": network,
        **{name: unwrapped(value) for name, value in objects.items() if isinstance(value, nn.Module)},
    }
    for name, module in modules.items():
        if (not name or name in loaded.objects) and (
            problem := weights_problem(module, loaded.items[name] if name else loaded.weights)
        ):
            raise InputError(f"{where} has {problem}{f' ({name})' if name else ''}")
    if loaded.optimizer is None and optimizer is not None:
        raise InputError(f"{where} has no optimizer: restore without one")
    if loaded.optimizer is not None and optimizer is not None:
        kind, groups, entries = loaded.optimizer
        if kind != type(optimizer).__name__:
            raise InputError(f"{where} was saved with {kind}, not {type(optimizer).__name__}: use {kind}")
        names = {id(weight): name for name, weight in _parameters(network).items()}
        if optimizer_problem(optimizer, groups, names) or entries.keys() - set(names.values()):
            raise InputError(f"{where} was saved with other parameters in the optimizer: give it the same groups")
    if stateless := [name for name, value in objects.items() if not is_object(value)]:
        raise InputError(f"{first_named(stateless)} has no load_state_dict: plain values are in what restore returns")
    if unknown := sorted(objects.keys() - set(loaded.objects)):
        raise InputError(f"{where} has no {first_named(unknown)}, but {first_named(loaded.objects) or 'no objects'}")
    whole = loaded.is_whole(optimizer)
    if whole and (absent := sorted(set(loaded.objects) - objects.keys())):
        raise InputError(f"{where} also has {first_named(absent)}: pass all that was saved to restore")
    of_rank = [name for name in loaded.own if name in objects or (whole and "/" not in name)]
    if of_rank and not loaded.same_ranks:
        raise InputError(
            f"{where} was saved by {plural(loaded.ranks, 'rank')}, each with its own {first_named(of_rank)}: start "
            f"{plural(loaded.ranks, 'rank')}"
        )
    if whole and loaded.same_ranks and loaded.items[RANDOM]["torch"].shape != torch.get_rng_state().shape:
        raise InputError(f"{where} has random states of another version of torch: use the one that saved it")


@torch.no_grad()
def apply_state(
    loaded: LoadedState, network: nn.Module, optimizer: Optimizer | None, objects: Mapping[str, Any]
) -> None:
    """Load a checkpoint that fits."""
    where = str(loaded.path)
    load_weights(where, loaded.weights, network)
    if loaded.same_ranks:
        saved = loaded.items.get(BUFFERS, {}) | loaded.items[CACHES]
        for name, buffer in network.named_buffers():
            tensor = saved.get(plain_name(name))
            # A cache may have grown: the network rebuilds it. A constant may be an expanded view: it cannot be written.
            if tensor is not None and tensor.shape == buffer.shape and not torch.equal(tensor, buffer):
                buffer.copy_(tensor)
    if optimizer is not None and loaded.optimizer is not None:
        _, groups, entries = loaded.optimizer
        load_optimizer_state(optimizer, groups, entries, _parameters(network))
    for name, value in objects.items():
        _load_state_dict(where, value, loaded.items[name])


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
