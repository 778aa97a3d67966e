"""Networks for evaluation, in which batch-norm layers are folded into the convolutions before them."""

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from cputrain.kernels.activations import RELU, activation_of
from cputrain.kernels.batchnorm import FUSED, FusedBatchNorm2d
from cputrain.kernels.convolution import CONVOLUTIONS, WinogradConv2d
from cputrain.kernels.evidence import are_maps, is_silent
from cputrain.kernels.fusion import activated, is_exactly
from cputrain.kernels.rewriting import residual_of

logger = logging.getLogger(__name__)

CACHE_BYTES = 16 << 20  # half of a level-3 cache of 32 MiB, which two workers of a thread each share


def fold_batchnorms(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a network for evaluation in which native batch-norm layers are folded into the convolutions before them.

    Its outputs equal those of `network` in evaluation, within the rounding of `dtype` (float32 or bfloat16). It has its
    own folded weights and shares all other layers. If the forward pass cannot be traced, the reason is logged and
    `network` is returned, as if a weight is not finite: oneDNN's ReLU turns NaN into 0.
    """
    values = (*network.named_parameters(), *network.named_buffers())
    if name := next((name for name, value in values if not value.isfinite().all()), ""):
        logger.info("evaluation without folding: %s is not finite", name)
        return network
    try:
        graph = _Tracer().trace(network)
    except Exception as error:  # noqa: BLE001  a forward pass may raise any exception for fx proxies
        logger.info("evaluation without folding: %s cannot be traced: %s", type(network).__name__, error)
        return network
    layers = dict(network.named_modules())
    calls = Counter(str(node.target) for node in graph.nodes if _is_layer(node))
    folded: dict[str, nn.Module] = {}
    for node in list(graph.nodes):
        before: Any = node.args[0] if node.args else None
        norm, conv = (layers.get(call.target) if _is_layer(call) else None for call in (node, before))
        if not isinstance(norm, FusedBatchNorm2d) or type(norm) not in FUSED.values():
            continue
        folds = calls[str(node.target)] == 1 and _can_fold(conv, norm) and len(before.users) == 1
        if not folds or len(node.args) + len(before.args) > 2:
            _join_activation(node, layers)
            continue
        ends = norm.activation is not None or activated(norm)  # in an activation, as a child of the layer
        after = _Following(last=node, relu=norm.activation == RELU) if ends else _following(node, layers)
        kind = FoldedWinogradConv2d if isinstance(conv, WinogradConv2d) else FoldedConv2d
        layer: nn.Module = kind(cast(Any, conv), norm, dtype, relu=after.relu)
        if ends and not after.relu:
            layer = nn.Sequential(layer, *(norm.get_submodule(name) for name in ("drop", "act")))
        folded[str(node.target)] = layer
        with graph.inserting_before(after.last):
            call = graph.call_module(str(node.target), (before.args[0], *after.residual))
        after.last.replace_all_uses_with(call)
        for unused in (*after.nodes, node, before):
            graph.erase_node(unused)
    _overwrite_residuals(graph, folded)
    result = fx.GraphModule(network, graph)
    for name, layer in folded.items():
        result.set_submodule(name, layer)
    # Break the reference cycle, so that the folded weights are freed at once and not by a later garbage collection.
    result.graph.owning_module = None
    return result.eval()


def _join_activation(norm: fx.Node, layers: dict[str, nn.Module]) -> None:
    """Let a native batch-norm layer that is not folded compute the activation after it, if nothing else uses its
    outputs."""
    user = next(iter(norm.users), norm)
    activation = activation_of(user, norm, layers.get(str(user.target)) if _is_layer(user) else None)
    if activation and len(norm.users) == 1 and is_silent(layers[str(norm.target)]):
        norm.kwargs = {**norm.kwargs, "activation": activation.name, "slope": activation.slope}
        user.replace_all_uses_with(norm)
        norm.graph.erase_node(user)


def _overwrite_residuals(graph: fx.Graph, folded: dict[str, nn.Module]) -> None:
    """Let folded layers add to their residual in place where that is a folded layer's output at its last use.

    All its other uses are folded layers before it, none of which keeps a view of it.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    calls = {node for node in graph.nodes if _is_layer(node) and str(node.target) in folded}
    excluded = set()  # layers, which a network may call several times
    for node in calls:
        images, *residual = node.args
        fits = residual != [] and residual[0] in calls and residual[0] is not images
        if not fits or any(user not in calls or position[user] > position[node] for user in residual[0].users):
            excluded.add(str(node.target))
    for name, layer in folded.items():
        if isinstance(layer, FoldedConv2d):
            layer.overwrites = name not in excluded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Following:
    """What follows batch-norm in a graph and is computed with it: its last node, the residual, ReLU, and all nodes,
    the last one first."""

    last: fx.Node
    residual: tuple[fx.Node, ...] = ()
    relu: bool
    nodes: tuple[fx.Node, ...] = ()


def _following(norm: fx.Node, layers: dict[str, nn.Module]) -> _Following:
    """Return the ReLU, or the addition and ReLU of a residual block, after batch-norm."""
    nodes: tuple[fx.Node, ...] = ()
    residual: tuple[fx.Node, ...] = ()
    last, relu = norm, False
    while not relu and len(last.users) == 1:
        (user,) = last.users
        layer = layers.get(str(user.target)) if _is_layer(user) else None
        relu = activation_of(user, last, layer) == RELU
        if not relu and not is_exactly(nn.Identity, layer):
            added = residual_of(user, last)
            if residual or added is None:
                break
            residual = (added,)
        last, nodes = user, (user, *nodes)
    if residual and not relu:
        return _Following(last=norm, relu=False)
    return _Following(last=last, residual=residual, relu=relu, nodes=nodes)


def _is_layer(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_module"


def _can_fold(conv: nn.Module | None, norm: FusedBatchNorm2d) -> bool:
    if not isinstance(conv, nn.Conv2d) or type(conv) not in CONVOLUTIONS:
        return False
    silent = is_silent(conv) and (is_silent(norm) or activated(norm))
    return silent and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


class _Tracer(fx.Tracer):
    """Tracer that treats convolutions and batch-norm layers, torch's and ours, as leaf modules."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Conv2d | nn.BatchNorm2d) or super().is_leaf_module(m, module_qualified_name)


def _folded(conv: nn.Conv2d, norm: FusedBatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return weight and bias, in float64, of the convolution with the batch-norm after it folded in."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    shift = norm.bias - scale * norm.running_mean
    return conv.weight * scale.view(-1, 1, 1, 1), shift if conv.bias is None else shift + scale * conv.bias


class FoldedConv2d(nn.Module):
    """A convolution with folded batch-norm, residual and ReLU, in one call of oneDNN.

    w' = w gamma / sqrt(variance + eps), b' = (b - mean) gamma / sqrt(variance + eps) + beta. The weights are reordered
    once, to oneDNN's layout for the shape of the first images.
    """

    weight: Tensor
    bias: Tensor
    packed = False
    overwrites = False
    """Whether the outputs take the residual's memory, which saves writing them elsewhere."""

    @torch.no_grad()
    def __init__(self, conv: nn.Conv2d, norm: FusedBatchNorm2d, dtype: torch.dtype, *, relu: bool) -> None:
        super().__init__()
        weight, bias = _folded(conv, norm)
        self.register_buffer("weight", weight.to(dtype=dtype, memory_format=torch.channels_last))
        self.register_buffer("bias", bias.to(dtype))
        self.options, self.sides = (conv.padding, conv.stride, conv.dilation, conv.groups), conv.kernel_size
        self.relu = relu

    def forward(self, images: Tensor, residual: Tensor | None = None) -> Tensor:
        """(N, C, H, W) -> (N, C', H', W')."""
        dtype = self.bias.dtype
        images, residual = images.to(dtype), None if residual is None else residual.to(dtype)
        if not self.packed:
            pack: Any = torch.ops.mkldnn._reorder_convolution_weight
            self.weight, self.packed = pack(self.weight, *self.options, list(images.shape)), True
        operators = torch.ops.mkldnn._convolution_pointwise
        layer: Any = (self.weight, self.bias, *self.options)
        tiny = residual is not None and residual.shape[2:].numel() == 1  # torch 2.8's binary call rejects 1 x 1 maps
        if residual is not None and (tiny or residual.shape != self._shape_of(images)):
            total = cast(Tensor, operators.default(images, *layer, "none", [], "")) + residual
            return total.relu_() if self.relu else total
        if residual is None:
            activation = "relu" if self.relu else "none"
            return cast(Tensor, operators.default(images, *layer, activation, [], ""))
        added: Any = ("add", 1.0, "relu" if self.relu else None, [], None)
        nhwc = torch.channels_last
        if self.overwrites and images.is_contiguous(memory_format=nhwc) and residual.is_contiguous(memory_format=nhwc):
            in_place = torch.ops.mkldnn._convolution_pointwise_.binary
            return cast(Tensor, in_place(residual, images, *layer, *added))
        return cast(Tensor, operators.binary(images, residual, *layer, *added))

    def _shape_of(self, images: Tensor) -> tuple[int, ...]:
        """Return the shape of the outputs."""
        options: Any = self.options[:3]
        sides = zip(images.shape[2:], self.sides, *options, strict=True)
        return (
            len(images),
            len(self.bias),
            *((n + 2 * pad - step * (side - 1) - 1) // stride + 1 for n, side, pad, stride, step in sides),
        )


class FoldedWinogradConv2d(nn.Module):
    """FoldedConv2d by Winograd's algorithm, with fused bias and ReLU; the weights are transformed once."""

    transformed: Tensor
    bias: Tensor

    @torch.no_grad()
    def __init__(self, conv: WinogradConv2d, norm: FusedBatchNorm2d, dtype: torch.dtype, *, relu: bool) -> None:
        super().__init__()
        weight, bias = _folded(conv, norm)
        self.kernels, self.padding, self.channels = conv.kernels, int(conv.padding[0]), conv.out_channels
        dense = weight.float().contiguous(memory_format=torch.channels_last)
        self.register_buffer("transformed", self.kernels.transform(dense))
        self.register_buffer("bias", bias.float())
        self.relu, self.dtype = relu, dtype
        self.plain = conv, norm  # in a tuple, because they are not layers of this one

    def forward(self, images: Tensor, residual: Tensor | None = None) -> Tensor:
        """(N, C, H, W) -> (N, C', H', W')."""
        conv, norm = self.plain
        images = images.to(self.dtype).contiguous(memory_format=torch.channels_last)
        if not are_maps(images, conv.in_channels) or min(images.shape[2:]) + 2 * self.padding < 3:
            return cast(Tensor, norm(conv(images), residual, activation="relu" if self.relu else ""))
        relu = self.relu and residual is None
        outputs = self.kernels.convolve(images, self.transformed, self.channels, self.padding, self.bias, relu=relu)
        if residual is None:
            return outputs
        outputs += residual.to(self.dtype)
        return outputs.relu_() if self.relu else outputs


class CacheBlocked(nn.Module):
    """A network that evaluates a batch in blocks of images whose activations stay in the last-level cache.

    ResNet-50 in float32, 32 images of 224 x 224 on a core of Zen 4: 1.2 times as fast in blocks of four or five
    (benchmarks/evaluation.py). The first batch, which tells how large the activations are, is computed as a whole. So
    are all batches if a block would have fewer images than there are threads, or if `network` returns no tensor with a
    row for each image. Its outputs for an image must not depend on the other images.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.block: int | None = None  # images; None before the first batch, 0 for whole batches

    def forward(self, images: Tensor) -> Any:
        """Return the network's outputs for images (N, C, H, W)."""
        if self.block is None and len(images):
            return self._measure_block(images)
        threads = torch.get_num_threads()
        count = min(-(-len(images) // self.block), len(images) // threads) if self.block else 1
        if count <= 1:
            return self.network(images)
        return torch.cat([self.network(block) for block in images.tensor_split(count)])

    def _measure_block(self, images: Tensor) -> Any:
        """Return the outputs, and set the size of a block by the largest activation."""
        sizes = [images.nbytes, 1]

        def record(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            if isinstance(outputs, Tensor):
                sizes.append(outputs.nbytes)

        hooks = [module.register_forward_hook(record) for module in self.network.modules()]
        try:
            outputs = self.network(images)
        finally:
            for hook in hooks:
                hook.remove()
        block = CACHE_BYTES * len(images) // max(sizes)
        rows = isinstance(outputs, Tensor) and outputs.shape[:1] == images.shape[:1]
        self.block = block if rows and block >= torch.get_num_threads() else 0
        return outputs
