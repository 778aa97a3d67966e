"""A copy of a rank's state for a checkpoint, and putting it back: weights, optimizer, statistics, random numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from affinity.errors import InputError
from cputrain.checkpoints.manifest import EMA, MODEL, OPTIMIZER, OptimizerRecord, rank_file
from cputrain.checkpoints.tensors import DTYPES
from cputrain.comm.hooks import Bf16AllReduceHook
from cputrain.models.weights import describe_difference, shapes
from cputrain.training.evaluation import mean_statistics
from cputrain.training.state import TrainState

Tensors = dict[str, Tensor]
RANDOM, BUFFER, RESIDUAL = "random", "buffer/", "residual/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Copies of the tensors that one rank writes, by file; the optimizer's other values on rank 0, None elsewhere."""

    files: dict[str, Tensors]
    optimizer: OptimizerRecord | None


def take_snapshot(state: TrainState, rank: int, optimizer_name: str) -> Snapshot:
    """Copy the state. To be called by all ranks: the weights' file has the ranks' mean batch-norm statistics, each
    rank's file its own."""
    means = {id(own): mean for own, mean in mean_statistics(state.network)}
    files = {rank_file(rank): _own_state(state)}
    if rank > 0:
        return Snapshot(files=files, optimizer=None)
    files[MODEL] = _weights(state.network, means)
    if state.ema_model is not None:
        averaged = dict(state.ema_model.named_parameters(remove_duplicate=False))  # tied weights have two names
        files[EMA] = {
            name: averaged[name].detach().clone() if name in averaged else value.clone()
            for name, value in files[MODEL].items()
        }
    names = {id(weight): name for name, weight in state.network.named_parameters()}
    files[OPTIMIZER] = {
        f"{names[id(weight)]}/{key}": value.detach().clone()
        for weight, entries in state.optimizer.state.items()
        for key, value in entries.items()
        if isinstance(value, Tensor)
    }
    return Snapshot(files=files, optimizer=optimizer_record(state.optimizer, state.network, optimizer_name))


def _weights(network: nn.Module, means: Mapping[int, Tensor]) -> Tensors:
    named = network.named_buffers(remove_duplicate=False)
    buffers = {name: means.get(id(buffer), buffer) for name, buffer in named}
    return {name: buffers.get(name, value).detach().clone() for name, value in network.state_dict().items()}


def _own_state(state: TrainState) -> Tensors:
    """What differs between ranks: random numbers, buffers, rounding errors of compressed gradients (in the weights'
    memory order)."""
    own = {RANDOM: torch.get_rng_state()}
    own |= {f"{BUFFER}{name}": buffer.clone() for name, buffer in state.network.named_buffers()}
    if isinstance(state.all_reduce, Bf16AllReduceHook):
        kept = state.all_reduce.residuals
        names = ((name, weight) for name, weight in state.network.named_parameters() if weight in kept)
        own |= {f"{RESIDUAL}{name}": kept[weight].clone() for name, weight in names}
    return own


def optimizer_record(optimizer: Optimizer, network: nn.Module, kind: str) -> OptimizerRecord:
    """What an optimizer has beside its tensors, which are in its file as "PARAMETER/KEY"."""
    names = {id(weight): name for name, weight in network.named_parameters()}
    values = {
        names[id(weight)]: plain
        for weight, entries in optimizer.state.items()
        if (plain := {key: value for key, value in entries.items() if not isinstance(value, Tensor)})
    }
    groups = tuple(
        {**group, "params": [names[id(weight)] for weight in group["params"]]} for group in optimizer.param_groups
    )
    return OptimizerRecord(name=kind, groups=groups, values=values)


def put_weights(where: str, saved: Tensors, network: nn.Module) -> None:
    """Load weights and buffers. Raises InputError where they are another network's; `where` names their checkpoint."""
    model, found = shapes(network.state_dict()), shapes(saved)
    differing = sorted(key for key in model.keys() | found.keys() if model.get(key) != found.get(key))
    if differing:
        raise InputError(f"checkpoint {where} has {describe_difference(differing, found, model)}")
    network.load_state_dict(saved)


def put_optimizer(where: str, record: OptimizerRecord, saved: Tensors, state: TrainState, kind: str) -> None:
    """Load the optimizer's state. Raises InputError for another optimizer's, or one of other weights."""
    if record.name != kind:
        raise InputError(f"checkpoint {where} has the state of optim.name={record.name}, not of {kind}: set it back")
    optimizer, weights = state.optimizer, dict(state.network.named_parameters())
    names = {id(weight): name for name, weight in weights.items()}
    order = [[names[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]
    if order != [group.get("params") for group in record.groups]:
        raise InputError(
            f"checkpoint {where} has an optimizer of other parameters: set model.freeze_to and model.name back"
        )
    entries: dict[str, dict[str, Any]] = {name: dict(values) for name, values in record.values.items()}
    for place, value in saved.items():
        name, _, key = place.rpartition("/")
        if name not in weights:
            raise InputError(f"checkpoint {where} has an optimizer of {name[:60]!r}, which the network lacks")
        entries.setdefault(name, {})[key] = _laid_out_as(weights[name], value)
    index = {name: number for number, name in enumerate(name for names in order for name in names)}
    optimizer.load_state_dict(
        {
            "state": {index[name]: entry for name, entry in entries.items()},
            "param_groups": [
                {**_typed_as(now, group), "params": [index[name] for name in group["params"]]}
                for now, group in zip(optimizer.param_groups, record.groups, strict=True)
            ],
        }
    )


def put_own_state(where: str, saved: Tensors, state: TrainState, *, same_ranks: bool, own_statistics: bool) -> None:
    """Load a rank's random numbers and, where as many ranks go on, its statistics and rounding errors. Raises
    InputError where they are those of another network; `where` names their checkpoint."""
    random = saved.get(RANDOM, torch.empty(0))
    if (random.shape, random.dtype) != ((now := torch.get_rng_state()).shape, now.dtype):
        raise InputError(f"checkpoint {where} has no random numbers of this torch: put back a copy of it")
    torch.set_rng_state(random.clone())
    if same_ranks and own_statistics:
        _put_buffers(where, saved, state.network)
    state.all_reduce.reset()
    if same_ranks and isinstance(state.all_reduce, Bf16AllReduceHook):
        weights = dict(state.network.named_parameters())
        for place, value in saved.items():
            if place.startswith(RESIDUAL):
                state.all_reduce.residuals[weights[place.removeprefix(RESIDUAL)]] = value.clone()


def _put_buffers(where: str, saved: Tensors, network: nn.Module) -> None:
    """Load this rank's own buffers. One that is not a part of the network's state (persistent=False) stays as it is
    where it had another shape: the network makes it by itself, as caches that grow."""
    persistent = network.state_dict().keys()
    for name, buffer in network.named_buffers():
        found = saved.get(f"{BUFFER}{name}")
        if found is not None and found.shape == buffer.shape:
            buffer.copy_(found)
        elif name in persistent:
            raise InputError(f"checkpoint {where} has no {name} of shape {tuple(buffer.shape)}: put back a copy of it")


def check_savable(network: nn.Module) -> None:
    """Raise InputError where checkpoints cannot hold a network's state: hours of training would be lost."""
    for name, value in {**network.state_dict(), **dict(network.named_buffers())}.items():
        if not isinstance(value, Tensor):
            raise InputError(f"{name} of the network is no tensor, and checkpoints hold nothing else: leave it out")
        if value.dtype not in DTYPES:
            raise InputError(f"{name} of the network is {value.dtype}, which checkpoints cannot hold: convert it")


def _laid_out_as(weight: Tensor, value: Tensor) -> Tensor:
    """A copy, in the weight's memory layout where it has the weight's shape, as fused optimizers require."""
    return (
        torch.empty_like(weight.detach(), dtype=value.dtype).copy_(value)
        if value.shape == weight.shape
        else value.clone()
    )


def _typed_as(now: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options from JSON, which has lists for tuples."""
    return {key: tuple(value) if isinstance(now.get(key), tuple) else value for key, value in saved.items()}
