"""How a network is run on this CPU: memory layout, oneDNN, precision, compilation."""

import time
from contextlib import AbstractContextManager
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

DTYPES = {"float32": torch.float32, "bf16": torch.float32, "float64": torch.float64}  # of weights and images
TRIES = 5


def prepare_model(model: nn.Module, engine: str, precision: str) -> nn.Module:
    """Lay the weights out channels-last, which oneDNN's convolutions want; with "compile", trace on first use."""
    model.to(dtype=DTYPES[precision], memory_format=torch.channels_last)  # type: ignore[call-overload]
    if engine == "compile":
        model.compile()
    return model


def network_input(images: Tensor, precision: str) -> Tensor:
    """Normalised images in the precision of the weights."""
    return images.to(DTYPES[precision])


def computing(precision: str) -> AbstractContextManager[object]:
    """Within it, bf16 computes convolutions and matrix products in bfloat16."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def bf16_speedup() -> float:
    """How many times faster a 3 x 3 convolution of ResNet-50 is here in bfloat16 than in float32, medians of 5 tries.

    Below 1 on CPUs that have no instructions for it.
    """
    images = torch.zeros(4, 64, 56, 56).to(memory_format=torch.channels_last)
    weights = torch.zeros(64, 64, 3, 3).to(memory_format=torch.channels_last)

    def seconds(dtype: torch.dtype) -> float:
        x, w = images.to(dtype), weights.to(dtype)
        taken = []
        for _ in range(TRIES + 1):  # the first prepares
            started = time.perf_counter()
            functional.conv2d(x, w, padding=1)
            taken.append(time.perf_counter() - started)
        return median(taken[1:])

    with torch.inference_mode():
        return seconds(torch.float32) / seconds(torch.bfloat16)
