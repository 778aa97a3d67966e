"""The weights of a checkpoint as one file, for programs that know nothing of checkpoints."""

import json
from pathlib import Path

import torch

from affinity.errors import InputError
from cputrain.checkpoints.manifest import EMA, MODEL, read_manifest
from cputrain.checkpoints.tensors import SUFFIX, read_file, write_tensors
from cputrain.files import write_with

TORCH_SUFFIXES = (".pt", ".pth")


def export_weights(checkpoint: Path, file: Path) -> int:
    """Write the weights that an evaluation of the checkpoint uses; returns the number of tensors.

    A safetensors file has the network, its classes and the normalization of images as text in its header, others are
    torch's state dicts. Raises InputError for another suffix, or a damaged checkpoint.
    """
    if file.suffix not in (SUFFIX, *TORCH_SUFFIXES):
        raise InputError(f"{file}: the suffix decides the format: give {SUFFIX}, or .pt for a state dict of torch")
    manifest = read_manifest(checkpoint)
    weights, _ = read_file(checkpoint, manifest, EMA if EMA in manifest.files else MODEL)
    if file.suffix == SUFFIX:
        network = manifest.network.model_dump(mode="json")
        text = {key: value if isinstance(value, str) else json.dumps(value) for key, value in network.items()}
        partial = file.with_name(f".{file.name}.partial")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(partial, weights, {"format": "pt", "step": str(manifest.step), **text})
        partial.replace(file)
    else:
        write_with(file, lambda opened: torch.save(weights, opened))
    return len(weights)
