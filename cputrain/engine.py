"""How a network is run on this CPU: memory layout, oneDNN, compilation; and how images become its input."""

import torch
from torch import Tensor, nn

from cputrain.recipe import DataSection


def prepare_model(model: nn.Module, engine: str) -> nn.Module:
    """Lay the weights out channels-last, which oneDNN's convolutions want; with "compile", trace on first use."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if engine == "compile":
        model.compile()
    return model


class Normalize:
    """Images as bytes -> the network's input."""

    def __init__(self, data: DataSection) -> None:
        self.shift = torch.tensor(data.mean).mul(255)
        self.scale = torch.tensor(data.std).mul(255).reciprocal()

    def __call__(self, images: Tensor) -> Tensor:
        """(N, H, W, 3) uint8 -> (N, 3, H, W) float32, channels-last in memory, (x / 255 - mean) / std."""
        made = torch.empty(images.shape, dtype=torch.float32)
        for image, place in zip(images, made, strict=True):  # each stays in the cache through its three passes
            place.copy_(image).sub_(self.shift).mul_(self.scale)
        return made.permute(0, 3, 1, 2)
