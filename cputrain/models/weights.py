"""Reading of saved weights, and of a recipe's initial weights."""

from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor, nn

from affinity.errors import InputError


def read_state(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a dict that torch.save wrote, without running code in it. Raises InputError.

    `mapped` reads only the tensors that are used; the file must not change as long as they are.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and is_zipfile(path))
    except Exception as error:  # noqa: BLE001  the unpickler may raise anything on a file of another format
        raise InputError(f"cannot read {path}: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(state, dict):
        raise InputError(f"{path} contains a {type(state).__name__}, no weights: save a state dict")
    return state


def load_initial_weights(model: nn.Module, path: Path) -> list[str]:
    """Load the weights of a checkpoint or a state dict; return the names of those that keep their initial values.

    Only the last layer may differ in shape, for other classes. Raises InputError that names the differing keys.
    """
    state = read_state(path)
    weights = state["model"] if isinstance(state.get("model"), dict) else state
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
