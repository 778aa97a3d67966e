"""Training state on disk: written beside, synced, renamed; read back without running any code in it."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from affinity.errors import InputError
from cputrain.files import write_with

BEST = "best.pt"


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: Optimizer, *, step: int, top1: float, keep: int, best: bool
) -> Path:
    """Write step-N.pt, keep the newest `keep`, and the best one besides as best.pt.

    `step` counts the updates done; `top1` is the best validation accuracy so far in percent, NaN before any.
    """
    path = folder / f"step-{step:07d}.pt"
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "top1": top1,
    }
    write_with(path, lambda file: torch.save(state, file))
    if best:
        # A second name for the same bytes: costs nothing, and outlives the first.
        beside = folder / f".{BEST}.partial"
        beside.unlink(missing_ok=True)
        os.link(path, beside)
        beside.rename(folder / BEST)
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """The numbered checkpoints, oldest first."""
    return sorted(folder.glob("step-*.pt"))


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Restore model and optimizer; returns step and top1. Raises InputError when file or model do not fit."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise InputError(f"cannot read checkpoint {path}: {' '.join(str(error).split())[:200]}") from None
    ours = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    theirs = {name: tuple(value.shape) for name, value in state["model"].items()}
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if differing:
        name = differing[0]
        raise InputError(
            f"checkpoint {path} is of another model: {len(differing)} keys differ, first {name}: "
            f"{theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} here"
        )
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    return {key: state[key] for key in ("step", "top1")}
