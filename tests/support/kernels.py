"""Native layers in networks of tests."""

import torch
from torch import Tensor, nn

from cputrain.kernels import rewriting
from cputrain.kernels.batchnorm import Kernels
from cputrain.kernels.rewriting import fuse_forwards, fused_forwards, native_norms, replace_norms


def fuse_batchnorms(network: nn.Module, kernels: Kernels) -> None:
    """Replace all batch-norm layers and forward passes for which there are kernels."""
    norms, forwards = native_norms(network), fused_forwards(network)
    replace_norms(network, [name for name, why in norms.items() if not why], kernels)
    fuse_forwards(forwards)


def left_to_torch(network: nn.Module) -> str:
    """Return a line with the layers that stay torch's."""
    forwards = fused_forwards(network).values()
    return rewriting.left_to_torch(network, {each.layer: each.refused for each in forwards if each.refused})


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], off: float = 1e-4) -> None:
    """Assert that all tensors differ by at most `off` of their largest value, and have the same dtypes."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        assert torch.allclose(got[name], value, rtol=off, atol=off * max(1.0, float(value.abs().max()))), name
