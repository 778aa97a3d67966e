"""State dicts as JSON with their tensors beside it, so that checkpoints store any object's state without pickle.

Dicts with text as keys, lists, numbers, texts and None are themselves. Anything else is a dict with one key that begins
with a mark: {"!tuple": [0.9, 0.999]}, {"!tensor": "scheduler/last"}.
"""

import base64
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from cputrain.affinity.errors import InputError
from cputrain.checkpoint.files import DTYPES

Tensors = dict[str, Tensor]
MARK = "!"
PLAIN = (type(None), bool, int, float, str)
SEQUENCES = {"tuple": tuple, "set": set}
DICTS = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def problem_of(value: object) -> str | None:
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


def encoded(value: Any, place: str, tensors: Tensors) -> Any:
    """Return a state as JSON; its tensors are added to `tensors`, not copied, under names that begin with `place`.

    Raises InputError for a value of another type, with its place.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, Tensor):
        if problem := problem_of(value):
            raise InputError(f"{place} {problem}")
        return {f"{MARK}tensor": _added(value.detach(), place, tensors)}
    if kind is np.ndarray and value.dtype.name in DTYPES:
        return {f"{MARK}array": _added(torch.from_numpy(np.ascontiguousarray(value)), place, tensors)}
    if isinstance(value, np.bool_ | np.integer | np.floating) and value.dtype.name in DTYPES:
        return {f"{MARK}scalar": [value.dtype.name, value.item()]}
    if kind is list:
        return _each(value, place, tensors)
    if kind in SEQUENCES.values():
        return {f"{MARK}{kind.__name__}": _each(value, place, tensors)}
    if kind is dict and all(type(key) is str and not key.startswith(MARK) for key in value):
        return {key: encoded(each, f"{place}/{key}", tensors) for key, each in value.items()}
    if kind in DICTS.values():
        pairs = [
            [encoded(key, place, tensors), encoded(each, f"{place}/{key}", tensors)] for key, each in value.items()
        ]
        return {f"{MARK}{kind.__name__}": pairs}
    if kind is bytes:
        return {f"{MARK}bytes": base64.b64encode(value).decode("ascii")}
    raise InputError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}, which checkpoints cannot store: keep numbers, texts, "
        "lists, dicts, arrays and tensors"
    )


def _each(values: Any, place: str, tensors: Tensors) -> list[Any]:
    return [encoded(each, f"{place}/{i}", tensors) for i, each in enumerate(values)]


def _added(value: Tensor, place: str, tensors: Tensors) -> str:
    while place in tensors:  # {"a/b": x, "a": {"b": y}}
        place += "'"
    tensors[place] = value
    return place


def decoded(tree: Any, tensors: Tensors) -> Any:
    """Return the state that `encoded` has given as JSON and tensors.

    Raises LookupError, TypeError or ValueError if they are of something else.
    """
    if isinstance(tree, list):
        return [decoded(each, tensors) for each in tree]
    if not isinstance(tree, dict):
        return tree
    mark = next(iter(tree), "")
    if not mark.startswith(MARK):
        return {key: decoded(each, tensors) for key, each in tree.items()}
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
        return SEQUENCES[name](decoded(value, tensors))
    return DICTS[name]({decoded(key, tensors): decoded(each, tensors) for key, each in value})
