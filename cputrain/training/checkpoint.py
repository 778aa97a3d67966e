"""Checkpoints: the training state in a file, replaced atomically, read without running code in it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from affinity.errors import InputError
from cputrain.files import write_with
from cputrain.models.weights import describe_difference, read_state, shapes
from cputrain.runs.folder import BEST, list_checkpoints
from cputrain.training.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The progress of a training at a checkpoint: steps done, and the best Accuracy.score so far, NaN before any."""

    step: int
    best_score: float


def save_checkpoint(folder: Path, state: TrainState, point: ResumePoint, *, keep: int, best: bool) -> Path:
    """Write step-N.pt and keep the newest `keep` of them; a best one is kept as best.pt too."""
    path = folder / f"step-{point.step:07d}.pt"
    content = {
        "model": state.network.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "step": point.step,
        "best_score": point.best_score,
    }
    if state.ema_model is not None:
        content["ema_model"] = state.eval_model().state_dict()
    write_with(path, lambda file: _write(content, file))
    if best:
        # A hard link takes no space, and stays when the numbered file is removed.
        partial = folder / f".{BEST}.partial"
        partial.unlink(missing_ok=True)
        os.link(path, partial)
        partial.rename(folder / BEST)
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def _write(content: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:  # about the end of the archive, which hides the file system's error
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def load_checkpoint(path: Path, state: TrainState) -> ResumePoint:
    """Restore the network, the EMA model and the optimizer. Raises InputError for an unsuitable file."""
    content = _read(path)
    _load_weights(path, content, "model", state.network)
    if state.ema_model is not None:
        _load_weights(path, content, "ema_model", state.ema_model)
    state.optimizer.load_state_dict(content["optimizer"])
    return ResumePoint(step=content["step"], best_score=content["best_score"])


def load_eval_model(path: Path, network: nn.Module) -> int:
    """Restore the weights to evaluate, of the EMA model if the file has one; return the steps done.

    Raises InputError for an unsuitable file.
    """
    content = _read(path, mapped=True)
    _load_weights(path, content, "ema_model" if "ema_model" in content else "model", network)
    return int(content["step"])


def _read(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    content = read_state(path, mapped=mapped)
    if not {"model", "optimizer", "step", "best_score"} <= content.keys():
        raise InputError(f"{path} is not a training checkpoint: to start from its weights, set model.weights")
    return content


def _load_weights(path: Path, content: dict[str, Any], name: str, network: nn.Module) -> None:
    if name not in content:
        raise InputError(f"checkpoint {path} has no {name}: it was trained with ema_decay=null, set that again")
    model, saved = shapes(network.state_dict()), shapes(content[name])
    differing = sorted(key for key in model.keys() | saved.keys() if model.get(key) != saved.get(key))
    if differing:
        raise InputError(f"checkpoint {path} has {describe_difference(differing, saved, model)}")
    network.load_state_dict(content[name])
