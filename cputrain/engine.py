"""How a network is run on this CPU: memory layout, oneDNN, compilation."""

import torch
from torch import nn


def prepare_model(model: nn.Module, engine: str) -> nn.Module:
    """Lay the weights out channels-last, which oneDNN's convolutions want; with "compile", trace on first use."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if engine == "compile":
        model.compile()
    return model
