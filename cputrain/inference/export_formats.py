"""The formats that a network is exported in: how each is written, and how its logits are computed from the file."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from affinity.errors import InputError
from cputrain.checkpoints.tensors import SUFFIX, read_tensors, write_tensors
from cputrain.models.weights import read_state

METADATA_FILE = "cputrain.json"  # inside a TorchScript archive
INPUT, OUTPUT = "images", "logits"

Forward = Callable[[Tensor], Tensor]
"""Normalized inputs, (N, ...) float32 -> logits, (N, outputs), computed by an exported file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format: the suffixes that stand for it, the usual one first.

    `write` puts a network in evaluation, which takes inputs like the given ones, and texts about it into a file; `open`
    returns how that file computes logits, where a state dict needs a network of the same kind, which it changes.
    """

    suffixes: tuple[str, ...]
    write: Callable[[nn.Module, Tensor, Mapping[str, str], Path], None]
    open: Callable[[Path, nn.Module], Forward]


def _write_safetensors(network: nn.Module, _inputs: Tensor, about: Mapping[str, str], path: Path) -> None:
    write_tensors(path, network.state_dict(), {"format": "pt", **about})


def _open_safetensors(path: Path, network: nn.Module) -> Forward:
    network.load_state_dict(read_tensors(path)[0])
    return network


def _write_state_dict(network: nn.Module, _inputs: Tensor, _about: Mapping[str, str], path: Path) -> None:
    torch.save(network.state_dict(), path)


def _open_state_dict(path: Path, network: nn.Module) -> Forward:
    network.load_state_dict(read_state(path))
    return network


def _write_torchscript(network: nn.Module, inputs: Tensor, about: Mapping[str, str], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls TorchScript outdated; those who ask for it know
        traced: Any = torch.jit.trace(network, inputs, check_trace=False)  # type: ignore[no-untyped-call]
        with path.open("wb") as file:  # torch takes no path that is not UTF-8
            torch.jit.save(traced, file, _extra_files={METADATA_FILE: json.dumps(dict(about), indent=1)})


def _open_torchscript(path: Path, _network: nn.Module) -> Forward:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with path.open("rb") as file:
            loaded: Forward = torch.jit.load(file, map_location="cpu")  # type: ignore[no-untyped-call]
    return loaded


def _write_onnx(network: nn.Module, inputs: Tensor, about: Mapping[str, str], path: Path) -> None:
    onnx = _onnx_package("onnx")
    _onnx_package("onnxscript")
    batch = torch.export.Dim("batch", min=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            network,
            (inputs,),
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: batch},),
            dynamo=True,
            verbose=False,
        )
    model = program.model_proto
    onnx.helper.set_model_props(model, dict(about))
    onnx.save(model, path)


def _open_onnx(path: Path, _network: nn.Module) -> Forward:
    runtime = _onnx_package("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])

    def run(inputs: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: inputs.numpy()})[0])

    return run


def _onnx_package(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise InputError(f"export to onnx needs {name}: pip install 'cputrain[onnx]'") from None


FORMATS = {
    "safetensors": Format(suffixes=(SUFFIX,), write=_write_safetensors, open=_open_safetensors),
    "state-dict": Format(suffixes=(".pt", ".pth"), write=_write_state_dict, open=_open_state_dict),
    "torchscript": Format(suffixes=(".torchscript", ".ts"), write=_write_torchscript, open=_open_torchscript),
    "onnx": Format(suffixes=(".onnx",), write=_write_onnx, open=_open_onnx),
}
