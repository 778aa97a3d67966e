"""State of a network and its optimizer by parameter names, copied for a checkpoint and loaded from one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import first_named
from cputrain.checkpoint.tree import Tensors, problem_of

COMPILED = "_orig_mod."  # inserted into names by torch.compile
Groups = list[dict[str, Any]]
Entries = dict[str, dict[str, Any]]


def plain_name(name: str) -> str:
    """Return a parameter's or buffer's name without what torch.compile inserts."""
    return name.replace(COMPILED, "")


def check_savable(named: Mapping[str, object], owner: str) -> None:
    """Raise InputError if checkpoints cannot store one of these tensors of the `owner`, such as "network"."""
    for name, value in named.items():
        if problem := problem_of(value):
            raise InputError(f"{name} of the {owner} {problem}")


def copied_weights(network: nn.Module, replaced: Mapping[int, Tensor] | None = None) -> Tensors:
    """Copy a module's state dict, with names as without torch.compile; `replaced` has other values for buffers by
    id."""
    named = network.named_buffers(remove_duplicate=False)
    buffers = {name: (replaced or {}).get(id(buffer), buffer) for name, buffer in named}
    state = network.state_dict()
    return {plain_name(name): buffers.get(name, value).detach().clone() for name, value in state.items()}


def weights_problem(network: nn.Module, saved: Tensors) -> str | None:
    """Return how a checkpoint's weights and buffers differ from the network's by name and shape; None if they fit."""
    own = {plain_name(name): tuple(value.shape) for name, value in network.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in saved.items()}
    missing, unexpected = sorted(own.keys() - found.keys()), sorted(found.keys() - own.keys())
    reshaped = [
        f"{name} {found[name]} instead of {own[name]}" for name in own if name in found and found[name] != own[name]
    ]
    parts = (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
    named = [f"{what} {first_named(names)}" for what, names in parts if names]
    return f"weights of another model: {'; '.join(named)}" if named else None


def load_weights(where: str, saved: Tensors, network: nn.Module) -> None:
    """Load weights and buffers from checkpoint `where`. Raises InputError if they belong to another network."""
    if problem := weights_problem(network, saved):
        raise InputError(f"checkpoint {where} has {problem}")
    state = network.state_dict()  # with the versions of its layers
    state.update({name: saved[plain_name(name)] for name in state})
    network.load_state_dict(state)


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[Groups, Entries]:
    """Return an optimizer's options by parameter group, and its state by parameter, not copied; `names` are the
    parameters' by id."""
    groups = [
        {**group, "params": [names[id(weight)] for weight in group["params"]]} for group in optimizer.param_groups
    ]
    return groups, {names[id(weight)]: dict(entries) for weight, entries in optimizer.state.items()}


def optimizer_problem(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> bool:
    """Return whether a checkpoint's optimizer has other parameters, or in other groups."""
    order = [[names.get(id(weight)) for weight in group["params"]] for group in optimizer.param_groups]
    return order != [group.get("params") for group in groups]


def load_optimizer_state(
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    entries: Entries,
    weights: Mapping[str, Tensor],
) -> None:
    """Load an optimizer's options and state, by the names of `weights`, in the types in which they were saved."""
    index = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    state = {
        name: {key: _laid_out_as(weights[name], value) for key, value in entry.items()}
        for name, entry in entries.items()
    }
    optimizer.load_state_dict(
        {
            "state": {index[name]: entry for name, entry in state.items()},
            "param_groups": [
                {**_typed_as(now, group), "params": [index[name] for name in group["params"]]}
                for now, group in zip(optimizer.param_groups, groups, strict=True)
            ],
        }
    )
    for name, entry in state.items():  # torch converts state to the type of its parameter, such as bfloat16
        loaded = optimizer.state[weights[name]]
        for key, value in entry.items():
            if isinstance(value, Tensor) and isinstance(loaded.get(key), Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value


def _laid_out_as(weight: Tensor, value: Any) -> Any:
    """Copy `value`, in the weight's memory layout if the shapes are equal, as fused optimizers require."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != weight.shape:
        return value.clone()
    return torch.empty_like(weight.detach(), dtype=value.dtype).copy_(value)


def _typed_as(now: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lists in a group's options from JSON back to tuples."""
    return {key: tuple(value) if isinstance(now.get(key), tuple) else value for key, value in saved.items()}
