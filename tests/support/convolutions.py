"""Convolutions, their images, and what their passes compute."""

import torch
from torch import Tensor, nn


def layer_of(inputs: int, outputs: int, kernel: int | tuple[int, int], **options: object) -> nn.Conv2d:
    torch.manual_seed(inputs + outputs)
    return nn.Conv2d(inputs, outputs, kernel, **options).to(memory_format=torch.channels_last)


def images_of(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(memory_format=torch.channels_last)


def passes(layer: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return outputs and gradients of a loss that weighs each output by its own number, with autocast for bfloat16."""
    x = images.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=images.dtype == torch.bfloat16):
        outputs = layer(x)
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=torch.bfloat16)  # the same numbers in any dtype
    outputs.backward(weights.view(outputs.shape).to(outputs.dtype))
    found = {"outputs": outputs.detach(), "images": x.grad, **{n: one.grad for n, one in layer.named_parameters()}}
    return {name: value for name, value in found.items() if value is not None}
