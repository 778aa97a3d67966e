"""Native layers in networks of tests."""

from torch import nn

from cputrain.kernels.batchnorm import Kernels
from cputrain.kernels.rewriting import fuse_forwards, fused_forwards, native_norms, replace_norms


def fuse_batchnorms(network: nn.Module, kernels: Kernels) -> None:
    """Replace all batch-norm layers and forward passes for which there are kernels."""
    norms, forwards = native_norms(network), fused_forwards(network)
    replace_norms(network, [name for name, why in norms.items() if not why], kernels)
    fuse_forwards(network, {name: each for name, each in forwards.items() if each and not isinstance(each, str)})
