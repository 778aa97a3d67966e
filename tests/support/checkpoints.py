"""Read checkpoints in tests: tensors and manifest of a run's newest checkpoint."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from cputrain.checkpoint.files import MODEL, list_checkpoints
from cputrain.manifest import EMA, Manifest, read_manifest


def newest(run: Path) -> Path:
    """Return the newest checkpoint of a run folder."""
    return list_checkpoints(run / "checkpoints")[-1]


def content(path: Path) -> dict[str, Any]:
    """Return a checkpoint's tensors by file and name, its weights as "model" and "ema_model", and its step."""
    files = {file.name: load_file(file) for file in path.glob("*.safetensors")}
    return {"files": files, "model": files[MODEL], "ema_model": files.get(EMA, {}), "step": read_manifest(path).step}


def differing(a: Path, b: Path) -> list[str]:
    """Return the differences between two checkpoints: tensors by file, and the state of the training."""
    ours, theirs = content(a)["files"], content(b)["files"]
    assert ours.keys() == theirs.keys() and all(ours[name].keys() == theirs[name].keys() for name in ours)
    tensors = [(file, name) for file in ours for name in ours[file]]
    found = [f"{file}: {name}" for file, name in tensors if not torch.equal(ours[file][name], theirs[file][name])]
    state: list[Manifest] = [read_manifest(path) for path in (a, b)]
    same = state[0].training == state[1].training and state[0].step == state[1].step
    return found if same else [*found, "training"]
