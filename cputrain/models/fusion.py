"""Layer fusion: fused batch-norm for training, folded batch-norm for evaluation."""

import logging
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from cputrain.models.batchnorm_relu import FUSED, FusedBatchNorm2d, Kernels, second_use
from cputrain.models.convolution import DirectConv2d, PointwiseConv2d, WinogradConv2d
from cputrain.models.vision import activate

CONVOLUTIONS = (nn.Conv2d, DirectConv2d, PointwiseConv2d, WinogradConv2d)
RESNETS = ("torchvision.models.resnet", "timm.models.resnet")
RESIDUAL_BLOCKS = {
    f"{module}.{name}": size for module in RESNETS for name, size in (("BasicBlock", 2), ("Bottleneck", 3))
}
"""Number of convolutions in the residual blocks of torchvision and timm, by class."""

FOLLOWED = {
    "torchvision.models.resnet.ResNet": (("bn1", "relu"),),
    "torchvision.models.densenet._DenseLayer": (("norm1", "relu1"), ("norm2", "relu2")),
    "timm.models.resnet.ResNet": (("bn1", "act1"),),
}
"""Pairs of batch-norm layer and following ReLU in modules of torchvision and timm, by class."""


def fuse_batchnorms(network: nn.Module, kernels: Kernels) -> None:
    """Replace batch-norm layers by native ones, fused with the ReLU after them in nn.Sequential, in the ResNets of
    torchvision and timm, in torchvision's DenseNets, and where timm has both in one layer.

    Parameters, buffers and their names do not change. Layers without parameters or running statistics are skipped.
    """
    for layer in list(network.modules()):
        fused = FUSED.get(cast(type[nn.BatchNorm2d], type(layer)))
        if fused and isinstance(layer, nn.BatchNorm2d) and layer.affine and layer.running_mean is not None:
            layer.__class__ = fused
            norm = cast(FusedBatchNorm2d, layer)
            norm.kernels = kernels
            if activated(norm) and type(norm.act) is nn.ReLU and type(norm.drop) is nn.Identity:
                norm._forward_hooks.clear()
                norm.relu = True
    for module in list(network.modules()):
        if type(module).forward is nn.Sequential.forward:
            names = [name for name, _ in module.named_children()]
            _fuse_relus(module, tuple(pairwise(names)))
        else:
            _fuse_relus(module, FOLLOWED.get(_class_of(module), ()))
        for name, child in list(module.named_children()):
            if _class_of(child) in RESIDUAL_BLOCKS and _can_fuse(child):
                setattr(module, name, FusedResidualBlock(child))


class FusedResidualBlock(nn.Module):
    """BasicBlock or Bottleneck of torchvision or timm (He et al. 2016, arXiv:1512.03385), with the same parameters and
    names."""

    downsample: nn.Module | None

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.convolutions = RESIDUAL_BLOCKS[_class_of(block)]
        for name, child in block.named_children():
            if name in self.parts(self.convolutions):
                self.add_module(name, child)
        if "downsample" not in self._modules:
            self.downsample = None
        for i in range(1, self.convolutions + 1):
            cast(FusedBatchNorm2d, self.get_submodule(f"bn{i}")).relu = True

    @staticmethod
    def parts(convolutions: int) -> tuple[str, ...]:
        """Return the names of a block's children that have parameters."""
        return (*(f"{kind}{i + 1}" for i in range(convolutions) for kind in ("conv", "bn")), "downsample")

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


def _class_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"


def _can_fuse(block: nn.Module) -> bool:
    """Return whether all batch-norm layers of a residual block are native and it has no other layers than ReLU, such
    as timm's attention or dropped blocks."""
    parts = FusedResidualBlock.parts(RESIDUAL_BLOCKS[_class_of(block)])
    norms = [layer for name, layer in block.named_children() if name in parts and name.startswith("bn")]
    others = [layer for name, layer in block.named_children() if name not in parts]
    native = all(isinstance(norm, FusedBatchNorm2d) and not norm._forward_hooks for norm in norms)
    return native and all(type(layer) in (nn.ReLU, nn.Identity) for layer in others)


def activated(layer: nn.Module) -> bool:
    """Return whether the activation of a batch-norm layer is its child, as in timm's BatchNormAct2d."""
    return activate in layer._forward_hooks.values()


def _fuse_relus(module: nn.Module, pairs: tuple[tuple[str, str], ...]) -> None:
    """Fuse each batch-norm layer with the ReLU after it, which is replaced by an identity."""
    for first, second in pairs:
        norm, relu = getattr(module, first), getattr(module, second)
        if isinstance(norm, FusedBatchNorm2d) and type(relu) is nn.ReLU:
            norm.relu = True
            setattr(module, second, nn.Identity())


logger = logging.getLogger(__name__)


def fold_batchnorms(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a network for evaluation in which native batch-norm layers are folded into the convolutions before them.

    Its outputs equal those of `network` in evaluation, within the rounding of `dtype` (float32 or bfloat16). It has its
    own folded weights and shares all other layers. If the forward pass cannot be traced, the reason is logged and
    `network` is returned.
    """
    try:
        graph = _Tracer().trace(network)
    except Exception as error:  # noqa: BLE001  a forward pass may raise any exception for fx proxies
        logger.info("evaluation without folding: %s cannot be traced: %s", type(network).__name__, error)
        return network
    layers = dict(network.named_modules())
    folded: dict[str, nn.Module] = {}
    for node in list(graph.nodes):
        before: Any = node.args[0] if node.args else None
        norm, conv = (layers.get(each.target) if _is_layer(each) else None for each in (node, before))
        if isinstance(norm, FusedBatchNorm2d) and _can_fold(conv) and len(before.users) == 1:
            kind = FoldedWinogradConv2d if isinstance(conv, WinogradConv2d) else FoldedConv2d
            layer: nn.Module = kind(cast(Any, conv), norm, dtype)
            if activated(norm):
                layer = nn.Sequential(layer, *(norm.get_submodule(name) for name in ("drop", "act")))
            folded[str(node.target)] = layer
            node.args = (before.args[0], *node.args[1:])
            graph.erase_node(before)
    _overwrite_residuals(graph, folded)
    made = fx.GraphModule(network, graph)
    for name, layer in folded.items():
        made.set_submodule(name, layer)
    # Break the reference cycle, so that the folded weights are freed at once and not by a later garbage collection.
    made.graph.owning_module = None
    return made.eval()


def _overwrite_residuals(graph: fx.Graph, folded: dict[str, nn.Module]) -> None:
    """Let folded layers add to their residual in place where that is a folded layer's output at its last use.

    All its other uses are folded layers before it, none of which keeps a view of it.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    calls = {node for node in graph.nodes if _is_layer(node) and str(node.target) in folded}
    kept = set()  # layers, which a network may call several times
    for node in calls:
        images, *residual = node.args
        fits = residual != [] and residual[0] in calls and residual[0] is not images
        if not fits or any(user not in calls or place[user] > place[node] for user in residual[0].users):
            kept.add(str(node.target))
    for name, layer in folded.items():
        if isinstance(layer, FoldedConv2d):
            layer.overwrites = name not in kept


def _is_layer(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_module"


def _can_fold(conv: nn.Module | None) -> bool:
    if not isinstance(conv, nn.Conv2d) or type(conv) not in CONVOLUTIONS:
        return False
    return conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


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
    def __init__(self, conv: nn.Conv2d, norm: FusedBatchNorm2d, dtype: torch.dtype) -> None:
        super().__init__()
        weight, bias = _folded(conv, norm)
        self.register_buffer("weight", weight.to(dtype=dtype, memory_format=torch.channels_last))
        self.register_buffer("bias", bias.to(dtype))
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
        if residual is not None and residual.shape[2:].numel() == 1:  # torch 2.8's binary call rejects 1 x 1 maps
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


class FoldedWinogradConv2d(nn.Module):
    """FoldedConv2d by Winograd's algorithm, with fused bias and ReLU; the weights are transformed once."""

    transformed: Tensor
    bias: Tensor

    @torch.no_grad()
    def __init__(self, conv: WinogradConv2d, norm: FusedBatchNorm2d, dtype: torch.dtype) -> None:
        super().__init__()
        weight, bias = _folded(conv, norm)
        self.kernels, self.padding, self.channels = conv.kernels, int(conv.padding[0]), conv.out_channels
        dense = weight.float().contiguous(memory_format=torch.channels_last)
        self.register_buffer("transformed", self.kernels.transform(dense))
        self.register_buffer("bias", bias.float())
        self.relu, self.dtype = norm.relu, dtype

    def forward(self, images: Tensor, residual: Tensor | None = None) -> Tensor:
        """(N, C, H, W) -> (N, C', H', W')."""
        images = images.to(self.dtype).contiguous(memory_format=torch.channels_last)
        relu = self.relu and residual is None
        outputs = self.kernels.convolve(images, self.transformed, self.channels, self.padding, self.bias, relu=relu)
        if residual is None:
            return outputs
        outputs += residual.to(self.dtype)
        return outputs.relu_() if self.relu else outputs


CACHE_BYTES = 16 << 20  # half of a level-3 cache of 32 MiB, which two workers of a thread each share


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
            return self._measured(images)
        threads = torch.get_num_threads()
        count = min(-(-len(images) // self.block), len(images) // threads) if self.block else 1
        if count <= 1:
            return self.network(images)
        return torch.cat([self.network(block) for block in images.tensor_split(count)])

    def _measured(self, images: Tensor) -> Any:
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
