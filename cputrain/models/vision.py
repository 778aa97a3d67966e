"""Networks of other libraries, as in model.name=LIBRARY:NAME: torchvision, also with a CPU build of torch, and timm."""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import library, nn

from cputrain.affinity.errors import InputError
from cputrain.kernels.norms import activate

# torchvision's CUDA wheels cannot load their operators into a CPU build of torch, so the import fails on undefined
# operators. Training a classifier does not need them.
MISSING = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[library.Library] = []  # operators stay declared while their Library object is alive


def import_torchvision(part: str) -> ModuleType:
    """Import `torchvision.PART`, even if torchvision was built for CUDA and torch for CPU."""
    name = f"torchvision.{part}"
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for known in [known for known in sys.modules if known.split(".")[0] == "torchvision"]:
        del sys.modules[known]  # incomplete modules of the failed import
    declared: Any = library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator, schema in MISSING.items():
        if not hasattr(torch.ops.torchvision, operator):
            declared.define(operator + schema)
    _declared.append(declared)
    return importlib.import_module(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLibrary:
    """A library of networks: `names()` are its classifiers', `build(name, outputs, side)` makes one with random weights
    for images of side x side pixels."""

    names: Callable[[], Sequence[str]]
    build: Callable[[str, int, int], nn.Module]


def _torchvision_names() -> Sequence[str]:
    models = import_torchvision("models")
    names: list[str] = models.list_models(module=models)
    return names


def _build_torchvision(name: str, outputs: int, _side: int) -> nn.Module:
    # these two have auxiliary classifiers, which are not used here
    options = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    network: nn.Module = import_torchvision("models").get_model_builder(name)(num_classes=outputs, **options)
    return network


def _import_timm() -> Any:
    """Import timm. Raises InputError if it is not installed."""
    import_torchvision("models")  # required by timm; it does not import by itself beside a CPU build of torch
    try:
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        raise InputError(
            f"model.name=timm:NAME needs timm, but {error.name} is not installed: run pip install 'cputrain[timm]'"
        ) from None


@cache
def _timm_names() -> Sequence[str]:
    """Return timm's networks, and behind them these with the tags of their weights, as in resnet50.a1_in1k."""
    timm = _import_timm()
    return (*timm.list_models(), *timm.list_pretrained())


def _build_timm(name: str, outputs: int, side: int) -> nn.Module:
    timm = _import_timm()
    trained = timm.get_pretrained_cfg(name)
    # Transformers of a fixed size are built for another one: only their position embeddings differ.
    fixed = trained is not None and trained.fixed_input_size and trained.input_size[-1] != side
    options = {"img_size": side} if fixed else {}
    network: nn.Module = timm.create_model(name, num_classes=outputs, **options)
    norm_with_activation = importlib.import_module("timm.layers").BatchNormAct2d
    for layer in network.modules():
        if type(layer) is norm_with_activation:
            layer.__class__ = nn.BatchNorm2d
            layer.register_forward_hook(activate)
    return network


NETWORK_LIBRARIES = {
    "torchvision": NetworkLibrary(names=_torchvision_names, build=_build_torchvision),
    "timm": NetworkLibrary(names=_timm_names, build=_build_timm),
}


def build_of_library(library_name: str, name: str, outputs: int, side: int) -> nn.Module:
    """Build a classifier of a library for `outputs` classes and images of side x side pixels. Raises InputError as
    `check_has_network` does."""
    check_has_network(library_name, name)
    return NETWORK_LIBRARIES[library_name].build(name, outputs, side)


def check_has_network(library_name: str, name: str) -> None:
    """Raise InputError if the library is not installed or does not have the network."""
    names = NETWORK_LIBRARIES[library_name].names()
    if name not in names:
        near = get_close_matches(name, [each for each in names if ("." in each) == ("." in name)], n=3, cutoff=0.4)
        advice = f" (did you mean {', '.join(near)}?)" if near else f": choose {', '.join(names[:5])} or others"
        raise InputError(f"model.name={library_name}:{name} is not a classifier of {library_name}{advice}")
