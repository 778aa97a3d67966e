"""1 x 1 convolutions as products of matrices, which oneDNN computes faster than convolutions in bfloat16 with AMX."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class PointwiseConv2d(nn.Conv2d):
    """A 1 x 1 convolution whose forward and backward passes are matrix products over all pixels.

    On AMX the products of ResNet-50's 1 x 1 layers take 0.82 times the time of oneDNN's convolutions, those of its last
    stage 0.4 to 0.7 times (benchmarks/pointwise.py).
    """

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C', H', W'), channels-last in memory; a single image (C, H, W) as torch does it."""
        if images.dim() != 4:
            return super().forward(images)
        down, right = self.stride
        pixels = images if down == right == 1 else images[:, :, ::down, ::right]
        weight = self.weight.permute(0, 2, 3, 1).flatten(1)  # a view, so that the gradient has the weight's strides
        places = pixels.permute(0, 2, 3, 1)
        rows = places.flatten(0, 2)  # two dimensions: of more, torch may multiply image by image
        return functional.linear(rows, weight, self.bias).view(*places.shape[:3], -1).permute(0, 3, 1, 2)


def use_products(network: nn.Module) -> None:
    """Let the 1 x 1 convolutions compute as products; parameters and their names stay."""
    for layer in network.modules():
        if type(layer) is nn.Conv2d and layer.kernel_size == (1, 1) and layer.groups == 1 and _no_padding(layer):
            layer.__class__ = PointwiseConv2d


def _no_padding(layer: nn.Conv2d) -> bool:
    return layer.padding in ((0, 0), "valid", "same")


def has_amx() -> bool:
    """Whether this CPU has AMX, matrix registers for bfloat16 (Sapphire Rapids and later), and the kernel lets this
    process use them: kernels before Linux 5.16 do not, and oneDNN then computes without."""
    return bool(torch.cpu._init_amx())
