"""torchvision on a CPU build of torch."""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch import library

# torchvision's wheels for CUDA cannot load their operators into a CPU torch; its Python side then fails to import
# because it describes operators that nobody has defined. None of them is needed for training a classifier.
MISSING = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[library.Library] = []  # what is declared lives as long as the object


def import_torchvision(part: str) -> ModuleType:
    """`torchvision.PART`, also where torchvision was built for CUDA and torch was not."""
    name = f"torchvision.{part}"
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for known in [known for known in sys.modules if known.split(".")[0] == "torchvision"]:
        del sys.modules[known]  # what the failed import left half-made
    declared: Any = library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator, schema in MISSING.items():
        if not hasattr(torch.ops.torchvision, operator):
            declared.define(operator + schema)
    _declared.append(declared)
    return importlib.import_module(name)
