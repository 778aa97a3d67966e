"""Weights to start from."""

from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor, nn

from affinity.errors import InputError


def read_state(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """What torch.save wrote, without running any code in it; `mapped` reads only what is used, for as long as the file
    stays as it is. Raises InputError."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and is_zipfile(path))
    except Exception as error:  # noqa: BLE001  a file of something else makes the unpickler raise anything
        raise InputError(f"cannot read {path}: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(state, dict):
        raise InputError(f"{path} holds no weights but a {type(state).__name__}: save a state dict")
    return state


def start_from(model: nn.Module, path: Path) -> list[str]:
    """Load the weights of a checkpoint of ours or a state dict; returns the names that start anew.

    Only the last layer may differ in shape, as the head of other classes does. Raises InputError naming the keys.
    """
    state = read_state(path)
    weights = state["model"] if isinstance(state.get("model"), dict) else state
    head = [name for name, _ in model.named_parameters()][-1].rpartition(".")[0]
    ours = model.state_dict()
    # how many steps batch-norm has counted decides nothing here, and old files lack it
    given = {name: value for name, value in ours.items() if name.endswith("num_batches_tracked")}
    given |= {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    other = [name for name in ours if name in given and given[name].shape != ours[name].shape]
    anew = [name for name in other if name.rpartition(".")[0] == head]
    differing = sorted(set(ours.keys() ^ given.keys()) | set(other) - set(anew))
    if differing:
        raise InputError(f"model.weights={path}: " + difference(differing, shapes(given), shapes(ours)))
    model.load_state_dict({**given, **{name: ours[name] for name in anew}})
    return anew


def shapes(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Each weight's shape."""
    return {name: tuple(value.shape) for name, value in state.items()}


def difference(names: list[str], theirs: dict[str, tuple[int, ...]], ours: dict[str, tuple[int, ...]]) -> str:
    """What distinguishes two state dicts, in words."""
    name = names[0]
    return (
        f"another model: {len(names)} keys differ, first {name}: "
        f"{theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} here"
    )
