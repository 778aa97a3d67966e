"""Training state on disk: written beside, synced, renamed; read back without running any code in it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from affinity.errors import InputError
from cputrain.files import write_with
from cputrain.models.weights import difference, read_state, shapes
from cputrain.runs.folder import BEST, list_checkpoints
from cputrain.training.step import Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """How far a training was: updates done, and the best Accuracy.score so far, NaN before any."""

    step: int
    top1: float


def save_checkpoint(folder: Path, learner: Learner, *, step: int, top1: float, keep: int, best: bool) -> Path:
    """Write step-N.pt, keep the newest `keep`, and the best one besides as best.pt.

    `step` counts the updates done; `top1` is the best Accuracy.score so far, NaN before any.
    """
    path = folder / f"step-{step:07d}.pt"
    state = {
        "model": learner.network.state_dict(),
        "optimizer": learner.optimizer.state_dict(),
        "step": step,
        "top1": top1,
    }
    if learner.mean is not None:
        state["mean"] = learner.judged().state_dict()
    write_with(path, lambda file: _write(state, file))
    if best:
        # A second name for the same bytes: costs nothing, and outlives the first.
        beside = folder / f".{BEST}.partial"
        beside.unlink(missing_ok=True)
        os.link(path, beside)
        beside.rename(folder / BEST)
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def _write(state: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:  # of the archive's end, which hides what the file system has said before
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def load_checkpoint(path: Path, learner: Learner) -> Progressed:
    """Restore weights, their mean and the optimizer. Raises InputError when file or network do not fit."""
    state = _state(path)
    _load(path, state, "model", learner.network)
    if learner.mean is not None:
        _load(path, state, "mean", learner.mean)
    learner.optimizer.load_state_dict(state["optimizer"])
    return Progressed(step=state["step"], top1=state["top1"])


def load_judged(path: Path, network: nn.Module) -> int:
    """Restore the weights that a training evaluates: their mean where it keeps one; the updates done before.

    Raises InputError likewise.
    """
    state = _state(path, mapped=True)
    _load(path, state, "mean" if "mean" in state else "model", network)
    return int(state["step"])


def _state(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    state = read_state(path, mapped=mapped)
    if not {"model", "optimizer", "step", "top1"} <= state.keys():
        raise InputError(f"{path} is no checkpoint of a training: model.weights starts from such files")
    return state


def _load(path: Path, state: dict[str, Any], what: str, network: nn.Module) -> None:
    if what not in state:
        raise InputError(f"checkpoint {path} holds no {what} of the weights: set ema_decay=null, as it was trained")
    ours, theirs = shapes(network.state_dict()), shapes(state[what])
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if differing:
        raise InputError(f"checkpoint {path} is of {difference(differing, theirs, ours)}")
    network.load_state_dict(state[what])
