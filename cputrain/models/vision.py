"""Import of torchvision with a CPU build of torch."""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch import library

# torchvision's CUDA wheels cannot load their operators into a CPU build of torch; the import then fails because it
# refers to operators that are not defined. Training a classifier needs none of them.
MISSING = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[library.Library] = []  # an operator is declared as long as its Library object lives


def import_torchvision(part: str) -> ModuleType:
    """Import `torchvision.PART`, even where torchvision was built for CUDA and torch was not."""
    name = f"torchvision.{part}"
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for known in [known for known in sys.modules if known.split(".")[0] == "torchvision"]:
        del sys.modules[known]  # the failed import left incomplete modules
    declared: Any = library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator, schema in MISSING.items():
        if not hasattr(torch.ops.torchvision, operator):
            declared.define(operator + schema)
    _declared.append(declared)
    return importlib.import_module(name)
