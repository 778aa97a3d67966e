"""Fused layers for training: batch-norm takes in the ReLU, and the addition of a residual, that follow it."""

from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from cputrain.models.batchnorm_kernels import Kernels
from cputrain.models.batchnorm_relu import FUSED, FusedBatchNorm2d, second_use

RESIDUAL_BLOCKS = {"BasicBlock": 2, "Bottleneck": 3}
"""Convolutions of torchvision's residual blocks, of one class or the other."""

FOLLOWED = {"ResNet": (("bn1", "relu"),), "_DenseLayer": (("norm1", "relu1"), ("norm2", "relu2"))}
"""Batch-norm layers and the ReLU after each, in torchvision's modules."""


def fuse_batchnorms(network: nn.Module, kernels: Kernels) -> None:
    """Make the batch-norm layers native, with the ReLU after them in nn.Sequential and torchvision's ResNets.

    Parameters, buffers and their names stay. So do layers without parameters or running statistics.
    """
    for layer in list(network.modules()):
        fused = FUSED.get(cast(type[nn.BatchNorm2d], type(layer)))
        if fused and isinstance(layer, nn.BatchNorm2d) and layer.affine and layer.running_mean is not None:
            layer.__class__ = fused
            cast(FusedBatchNorm2d, layer).kernels = kernels
    for module in list(network.modules()):
        if type(module).forward is nn.Sequential.forward:
            names = [name for name, _ in module.named_children()]
            _fuse_relus(module, tuple(pairwise(names)))
        else:
            _fuse_relus(module, FOLLOWED.get(_torchvision_class(module), ()))
        for name, child in list(module.named_children()):
            if _torchvision_class(child) in RESIDUAL_BLOCKS and _all_fused(child):
                setattr(module, name, FusedResidualBlock(child))


class FusedResidualBlock(nn.Module):
    """torchvision's BasicBlock or Bottleneck (He et al. 2016, arXiv:1512.03385) with its children under their names."""

    downsample: nn.Module | None

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.convolutions = RESIDUAL_BLOCKS[type(block).__name__]
        for name, child in block.named_children():
            if name != "relu":
                self.add_module(name, child)
        if "downsample" not in self._modules:
            self.downsample = None
        for i in range(1, self.convolutions + 1):
            cast(FusedBatchNorm2d, self.get_submodule(f"bn{i}")).relu = True

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C', H', W')."""
        out = images
        for i in range(1, self.convolutions):
            out = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(out))
        last = self.convolutions
        out = getattr(self, f"conv{last}")(out)
        identity = second_use(images)
        if self.downsample is not None:
            identity = self.downsample(identity)
        return cast(Tensor, getattr(self, f"bn{last}")(out, identity))


def _torchvision_class(module: nn.Module) -> str:
    """The name of a class of torchvision's networks, "" for others."""
    return type(module).__name__ if type(module).__module__.startswith("torchvision.models.") else ""


def _all_fused(block: nn.Module) -> bool:
    norms = [child for name, child in block.named_children() if name.startswith("bn")]
    return all(isinstance(norm, FusedBatchNorm2d) for norm in norms)


def _fuse_relus(module: nn.Module, pairs: tuple[tuple[str, str], ...]) -> None:
    """Let batch-norm layers take in the ReLU after them, which then passes its input on."""
    for first, second in pairs:
        norm, relu = getattr(module, first), getattr(module, second)
        if isinstance(norm, FusedBatchNorm2d) and type(relu) is nn.ReLU:
            norm.relu = True
            setattr(module, second, nn.Identity())
