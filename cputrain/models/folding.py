"""Networks for evaluation: batch-norm folded into the convolution before it, residual and ReLU left to oneDNN."""

import logging
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from cputrain.models.batchnorm_relu import FusedBatchNorm2d
from cputrain.models.pointwise import PointwiseConv2d

logger = logging.getLogger(__name__)


def fold_batchnorms(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A network with the outputs of `network` in evaluation, within the rounding of `dtype`, by oneDNN's convolutions.

    It computes in float32 or bfloat16, has folded weights of its own, and shares other layers. Native batch-norm layers
    that follow a convolution are folded; a network whose forward pass cannot be traced is returned as it is, and the
    reason is logged.
    """
    try:
        graph = _Tracer().trace(network)
    except Exception as error:  # noqa: BLE001  a forward pass may do anything with the tracer's stand-ins
        logger.info("evaluation without folding: %s cannot be traced: %s", type(network).__name__, error)
        return network
    layers = dict(network.named_modules())
    folded: dict[str, nn.Module] = {}
    for node in list(graph.nodes):
        before: Any = node.args[0] if node.args else None
        norm, conv = (layers.get(each.target) if _is_layer(each) else None for each in (node, before))
        if isinstance(norm, FusedBatchNorm2d) and _can_fold(conv) and len(before.users) == 1:
            folded[str(node.target)] = FoldedConv2d(cast(nn.Conv2d, conv), norm, dtype)
            node.args = (before.args[0], *node.args[1:])
            graph.erase_node(before)
    made = fx.GraphModule(network, graph)
    for name, layer in folded.items():
        made.set_submodule(name, layer)
    # Without this cycle the folded weights go with the network's last use, not with a garbage collection at some time.
    made.graph.owning_module = None
    return made.eval()


def _is_layer(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_module"


def _can_fold(conv: nn.Module | None) -> bool:
    if not isinstance(conv, nn.Conv2d) or type(conv) not in (nn.Conv2d, PointwiseConv2d):
        return False
    return conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


class _Tracer(fx.Tracer):
    """A tracer to which a convolution or batch-norm is one step, torch's and ours."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Conv2d | nn.BatchNorm2d) or super().is_leaf_module(m, module_qualified_name)


class FoldedConv2d(nn.Module):
    """A convolution with the scale and shift of the batch-norm after it, a residual and ReLU, in one call of oneDNN.

    w' = w gamma / sqrt(variance + eps), b' = (b - mean) gamma / sqrt(variance + eps) + beta. The first images decide
    the order in which oneDNN keeps the weights; from then on none are reordered.
    """

    weight: Tensor
    bias: Tensor
    packed = False

    @torch.no_grad()
    def __init__(self, conv: nn.Conv2d, norm: FusedBatchNorm2d, dtype: torch.dtype) -> None:
        super().__init__()
        assert norm.running_mean is not None and norm.running_var is not None
        scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
        shift = norm.bias - scale * norm.running_mean
        weight = (conv.weight * scale.view(-1, 1, 1, 1)).to(dtype=dtype, memory_format=torch.channels_last)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", (shift if conv.bias is None else shift + scale * conv.bias).to(dtype))
        self.options = conv.padding, conv.stride, conv.dilation, conv.groups
        self.relu = norm.relu

    def forward(self, images: Tensor, residual: Tensor | None = None) -> Tensor:
        """(N, C, H, W) -> (N, C', H', W')."""
        dtype = self.bias.dtype
        images, residual = images.to(dtype), None if residual is None else residual.to(dtype)
        if not self.packed:
            pack: Any = torch.ops.mkldnn._reorder_convolution_weight
            self.weight, self.packed = pack(self.weight, *self.options, list(images.shape)), True
        operators = torch.ops.mkldnn._convolution_pointwise
        layer: Any = (self.weight, self.bias, *self.options)
        if residual is not None and residual.shape[2:].numel() == 1:  # torch 2.8's binary call refuses single pixels
            added = cast(Tensor, operators.default(images, *layer, "none", [], "")) + residual
            return added.relu_() if self.relu else added
        if residual is None:
            activation = "relu" if self.relu else "none"
            return cast(Tensor, operators.default(images, *layer, activation, [], ""))
        last = "relu" if self.relu else None
        return cast(Tensor, operators.binary(images, residual, *layer, "add", 1.0, last, [], None))
