"""State of a network and its optimizer by parameter names, copied for a checkpoint and loaded from one; any object's
state dict as JSON with its tensors beside it, so that checkpoints store it without pickle.

In this JSON dicts with text as keys, lists, numbers, texts and None are themselves. Anything else is a dict with one
key that begins with a mark: {"!tuple": [0.9, 0.999]}, {"!tensor": "scheduler/last"}.
"""

import base64
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import first_named
from cputrain.checkpoint.files import DTYPES

COMPILED = "_orig_mod."  # inserted into names by torch.compile
Groups = list[dict[str, Any]]
Entries = dict[str, dict[str, Any]]

Tensors = dict[str, Tensor]
MARK = "!"
PLAIN = (type(None), bool, int, float, str)
SEQUENCES = {"tuple": tuple, "set": set}
DICTS = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def plain_name(name: str) -> str:
    """Return a parameter's or buffer's name without what torch.compile inserts."""
    return name.replace(COMPILED, "")


def check_savable(tensors: Mapping[str, object], owner: str) -> None:
    """Raise InputError if checkpoints cannot store one of these tensors of the `owner`, such as "network"."""
    for name, value in tensors.items():
        if problem := storage_problem(value):
            raise InputError(f"{name} of the {owner} {problem}")


def copied_weights(network: nn.Module, replaced: Mapping[int, Tensor] | None = None) -> Tensors:
    """Copy a module's state dict, with names as without torch.compile; `replaced` has other values for buffers by
    id."""
    named_buffers = network.named_buffers(remove_duplicate=False)
    buffers = {name: (replaced or {}).get(id(buffer), buffer) for name, buffer in named_buffers}
    state = network.state_dict()
    return {plain_name(name): buffers.get(name, value).detach().clone() for name, value in state.items()}


def weights_problem(network: nn.Module, saved: Tensors) -> str | None:
    """Return how a checkpoint's weights and buffers differ from the network's by name and shape; None if they fit."""
    expected = {plain_name(name): tuple(value.shape) for name, value in network.state_dict().items()}
    shapes = {name: tuple(value.shape) for name, value in saved.items()}
    missing, unexpected = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    reshaped = [
        f"{name} {shapes[name]} instead of {expected[name]}"
        for name in expected
        if name in shapes and shapes[name] != expected[name]
    ]
    parts = (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
    differences = [f"{what} {first_named(names)}" for what, names in parts if names]
    return f"weights of another model: {'; '.join(differences)}" if differences else None


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


def storage_problem(value: object) -> str | None:
    """Return why a checkpoint cannot store a tensor, and what to do; None if it can."""
    if not isinstance(value, Tensor):
        return "is not a tensor, so checkpoints cannot store it: remove it"
    if is_lazy(value):
        return "has no shape yet, so checkpoints cannot store it: run a forward pass first"
    if value.is_meta:
        return "is on the meta device, so it has no values to store: initialize the model on the CPU"
    if hasattr(value, "placements"):
        return "is a DTensor, split over ranks, which checkpoints cannot store: use torch.distributed.checkpoint"
    if value.is_nested or value.is_quantized:
        return "is a nested or quantized tensor, which checkpoints cannot store: convert it"
    if str(value.dtype).removeprefix("torch.") not in DTYPES:
        return f"is {value.dtype}, which checkpoints cannot store: convert it"
    if value.layout != torch.strided:
        return "is a sparse tensor, which checkpoints cannot store: convert it"
    if value.device.type != "cpu":
        return f"is on {value.device}, and checkpoints store tensors of the CPU: move it there"
    return None


def encode_state(value: Any, path: str, tensors: Tensors) -> Any:
    """Return a state as JSON; its tensors are added to `tensors`, not copied, under names that begin with `path`.

    Raises InputError for a value of another type, with its place.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, Tensor):
        if problem := storage_problem(value):
            raise InputError(f"{path} {problem}")
        return {f"{MARK}tensor": _added(value.detach(), path, tensors)}
    if kind is np.ndarray and value.dtype.name in DTYPES:
        return {f"{MARK}array": _added(torch.from_numpy(np.ascontiguousarray(value)), path, tensors)}
    if isinstance(value, np.bool_ | np.integer | np.floating) and value.dtype.name in DTYPES:
        return {f"{MARK}scalar": [value.dtype.name, value.item()]}
    if kind is list:
        return _each(value, path, tensors)
    if kind in SEQUENCES.values():
        return {f"{MARK}{kind.__name__}": _each(value, path, tensors)}
    if kind is dict and all(type(key) is str and not key.startswith(MARK) for key in value):
        return {key: encode_state(item, f"{path}/{key}", tensors) for key, item in value.items()}
    if kind in DICTS.values():
        pairs = [
            [encode_state(key, path, tensors), encode_state(item, f"{path}/{key}", tensors)]
            for key, item in value.items()
        ]
        return {f"{MARK}{kind.__name__}": pairs}
    if kind is bytes:
        return {f"{MARK}bytes": base64.b64encode(value).decode("ascii")}
    raise InputError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which checkpoints cannot store: keep numbers, texts, "
        "lists, dicts, arrays and tensors"
    )


def _each(values: Any, path: str, tensors: Tensors) -> list[Any]:
    return [encode_state(item, f"{path}/{i}", tensors) for i, item in enumerate(values)]


def _added(value: Tensor, path: str, tensors: Tensors) -> str:
    while path in tensors:  # {"a/b": x, "a": {"b": y}}
        path += "'"
    tensors[path] = value
    return path


def decode_state(tree: Any, tensors: Tensors) -> Any:
    """Return the state that `encode_state` has given as JSON and tensors.

    Raises LookupError, TypeError or ValueError if they are of something else.
    """
    if isinstance(tree, list):
        return [decode_state(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    mark = next(iter(tree), "")
    if not mark.startswith(MARK):
        return {key: decode_state(item, tensors) for key, item in tree.items()}
    name, value = mark.removeprefix(MARK), tree[mark]
    if name == "tensor":
        return tensors[
            value
        ].clone()  # a file's tensors have another alignment, with which operations may round otherwise
    if name == "array":
        return tensors[value].clone().numpy()
    if name == "scalar" and value[0] in DTYPES:
        return np.dtype(value[0]).type(value[1])
    if name == "bytes":
        return base64.b64decode(value, validate=True)
    if name in SEQUENCES:
        return SEQUENCES[name](decode_state(value, tensors))
    return DICTS[name]({decode_state(key, tensors): decode_state(item, tensors) for key, item in value})
