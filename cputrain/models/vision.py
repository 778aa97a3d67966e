"""Import of torchvision with a CPU build of torch."""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch import library

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
