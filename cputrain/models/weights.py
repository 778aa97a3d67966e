"""Reading of saved weights, and of a recipe's initial weights."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from affinity.errors import InputError
from cputrain.checkpoints.manifest import MODEL, read_manifest
from cputrain.checkpoints.tensors import SUFFIX, read_file, read_tensors


def read_weights(path: Path) -> dict[str, Any]:
    """The weights in a checkpoint's folder, a safetensors file, or a file of torch.save. Raises InputError."""
    if path.is_dir():
        return read_file(path, read_manifest(path), MODEL)[0]
    if path.suffix == SUFFIX:
        return read_tensors(path)[0]
    state = read_state(path)
    return state["model"] if isinstance(state.get("model"), dict) else state


def read_state(path: Path) -> dict[str, Any]:
    """Read a dict that torch.save wrote, without running code in it. Raises InputError."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  the unpickler may raise anything on a file of another format
        raise InputError(_unreadable(path, error)) from None
    if not isinstance(state, dict):
        raise InputError(f"{path} contains a {type(state).__name__}, no weights: save a state dict")
    return state


def _unreadable(path: Path, error: Exception) -> str:
    """Why torch cannot load a file, in a line."""
    code = re.search(r"(?:GLOBAL|unrecognized function|unsupported class) (\S+)", str(error))
    if code:
        return f"{path} asks to run code ({code[1]}), which was not done: name a file from a source that you trust"
    if isinstance(error, OSError):
        return f"cannot read {path}: {error.strerror}"
    return f"{path} is not a file of weights, or is damaged: name a checkpoint, a safetensors file or a state dict"


def load_initial_weights(model: nn.Module, path: Path) -> list[str]:
    """Load the weights of a checkpoint or a state dict; return the names of those that keep their initial values.

    Only the last layer may differ in shape, for other classes. Raises InputError that names the differing keys.
    """
    weights = read_weights(path)
    head = [name for name, _ in model.named_parameters()][-1].rpartition(".")[0]
    initial = model.state_dict()
    # batch-norm's step counters have no effect here, and old files lack them
    saved = {name: value for name, value in initial.items() if name.endswith("num_batches_tracked")}
    saved |= {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    reshaped = [name for name in initial if name in saved and saved[name].shape != initial[name].shape]
    reinitialized = [name for name in reshaped if name.rpartition(".")[0] == head]
    differing = sorted(set(initial.keys() ^ saved.keys()) | set(reshaped) - set(reinitialized))
    if differing:
        raise InputError(f"model.weights={path}: {describe_difference(differing, shapes(saved), shapes(initial))}")
    model.load_state_dict({**saved, **{name: initial[name] for name in reinitialized}})
    return reinitialized


Shapes = dict[str, tuple[int, ...]]


def shapes(state: dict[str, Tensor]) -> Shapes:
    """The shape of each weight."""
    return {name: tuple(value.shape) for name, value in state.items()}


def describe_difference(names: list[str], saved: Shapes, model: Shapes) -> str:
    """A line about the weights `names`, which differ between a file and a model."""
    name = names[0]
    return (
        f"weights of another model: {len(names)} keys differ, first {name}: "
        f"{saved.get(name, 'absent')} in the file, {model.get(name, 'absent')} in the model"
    )
