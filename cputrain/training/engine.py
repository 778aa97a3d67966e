"""How a network runs on the CPU: memory format, precision, compilation."""

import time
from contextlib import AbstractContextManager
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

DTYPES = {"float32": torch.float32, "bf16": torch.float32, "float64": torch.float64}  # of weights and images
ROUNDS = 5


def prepare_model(model: nn.Module, engine: str, precision: str) -> nn.Module:
    """Convert the weights to channels-last, which oneDNN's convolutions need; with "compile", compile on first use."""
    model.to(dtype=DTYPES[precision], memory_format=torch.channels_last)  # type: ignore[call-overload]
    if engine == "compile":
        model.compile()
    return model


def network_input(images: Tensor, precision: str) -> Tensor:
    """Normalized images in the data type of the weights."""
    return images.to(DTYPES[precision])


def autocast(precision: str) -> AbstractContextManager[object]:
    """A context in which bf16 computes convolutions and matrix products in bfloat16; no effect for others."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def bf16_speedup() -> float:
    """The speed of a 3 x 3 convolution of ResNet-50 in bfloat16, relative to float32; medians of 5 rounds.

    Below 1 on CPUs without instructions for bfloat16.
    """
    images = torch.zeros(4, 64, 56, 56).to(memory_format=torch.channels_last)
    weights = torch.zeros(64, 64, 3, 3).to(memory_format=torch.channels_last)

    def seconds(dtype: torch.dtype) -> float:
        x, w = images.to(dtype), weights.to(dtype)
        durations = []
        for _ in range(ROUNDS + 1):  # the first is a warm-up
            started = time.perf_counter()
            functional.conv2d(x, w, padding=1)
            durations.append(time.perf_counter() - started)
        return median(durations[1:])

    with torch.inference_mode():
        return seconds(torch.float32) / seconds(torch.bfloat16)
