"""Batch-norm, ReLU and residual as one native layer in modules whose forward pass is known."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, wraps
from inspect import isfunction
from itertools import pairwise
from typing import Any, cast

from torch import Tensor, nn

from cputrain.kernels.batchnorm import FUSED, FusedBatchNorm2d, Kernels, second_use
from cputrain.kernels.convolution import CONVOLUTIONS
from cputrain.kernels.evidence import (
    Native,
    calls_are_plain,
    departure,
    is_silent,
    methods_are_plain,
    replaced_functions,
    runs_eagerly,
)
from cputrain.kernels.norms import activate


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualLayers:
    """Children of a residual block: its number of convolutions with batch-norm, the names of its ReLUs, and names of
    layers that a fused block must not have."""

    convolutions: int
    relus: tuple[str, ...]
    absent: tuple[str, ...] = ()


OTHERS_OF_TIMM = ("drop_block", "aa", "se", "drop_path")
RESIDUAL_BLOCKS = {
    "torchvision.models.resnet.BasicBlock": ResidualLayers(convolutions=2, relus=("relu",)),
    "torchvision.models.resnet.Bottleneck": ResidualLayers(convolutions=3, relus=("relu",)),
    "timm.models.resnet.BasicBlock": ResidualLayers(convolutions=2, relus=("act1", "act2"), absent=OTHERS_OF_TIMM),
    "timm.models.resnet.Bottleneck": ResidualLayers(
        convolutions=3, relus=("act1", "act2", "act3"), absent=OTHERS_OF_TIMM
    ),
}
"""Residual blocks (He et al. 2016, arXiv:1512.03385) of torchvision and timm, by class."""

STAGES = tuple(pairwise(f"layer{i}" for i in range(1, 5)))
FOLLOWED = {
    "torchvision.models.resnet.ResNet": (("bn1", "relu"), *STAGES),
    "torchvision.models.densenet._DenseLayer": (("norm1", "relu1"), ("norm2", "relu2")),
    "timm.models.resnet.ResNet": (("bn1", "act1"), *STAGES),
}
"""Children that are called one after the other in modules of torchvision and timm, by class: batch-norm layers and
ReLUs, and stages of residual blocks."""


def fuse_batchnorms(network: nn.Module, kernels: Kernels) -> None:
    """Replace batch-norm layers by native ones, and compute them together with the ReLU after them in nn.Sequential, in
    the ResNets of torchvision and timm, in torchvision's DenseNets, and where timm has both in one layer.

    Only layers as built are replaced: of exactly these classes, with options that the kernels have, without hooks, and
    without attributes in the place of methods. Hooks and layers that are set later count from the next call on.

    All modules, parameters and buffers and their names stay; only classes change. `restore` undoes it.
    """
    for layer in list(network.modules()):
        if isinstance(layer, nn.BatchNorm2d) and not isinstance(layer, FusedBatchNorm2d) and not _unfit(layer):
            _use_kernels(layer, kernels)
    for module in list(network.modules()):
        kind: Any = _caller_of(module)
        plain: Any = type(module)
        if kind is None or not kind.has_norms(module) or departure(module):
            continue
        if kind is not FusedResidualBlock or not kind.reasons(module):
            module.__class__ = _fused_class(kind, plain)


def left_to_torch(network: nn.Module) -> str:
    """Return a line with the layers that `fuse_batchnorms` has left to torch, by class and reason; "" if none."""
    if replaced := replaced_functions():
        return f"not native, but torch's: all layers, because torch.nn.functional.{replaced[0]} is replaced"
    left = Counter[str]()
    for module in network.modules():
        kind = type(module) if isinstance(module, FusedCaller) else _caller_of(module)
        if isinstance(module, nn.BatchNorm2d) and not isinstance(module, FusedBatchNorm2d):
            left[f"{type(module).__name__} ({_unfit(module)})"] += 1
        elif kind is not None and kind.has_norms(module):
            own = "" if isinstance(module, FusedCaller) else departure(module)
            left.update(f"{type(module).__name__} ({reason})" for reason in ([own] if own else kind.reasons(module)))
    layers = ", ".join(f"{count} {what}" for what, count in sorted(left.items()))
    return f"not native, but torch's: {layers}" if left else ""


def _unfit(layer: nn.BatchNorm2d) -> str:
    """Return why a batch-norm layer stays torch's, "" if it can be native."""
    if type(layer) not in FUSED and not _has_activation(layer):
        return "not torch's BatchNorm2d"
    options = {
        "affine=False": layer.weight is None,
        "bias=False": layer.weight is not None and layer.bias is None,
        "track_running_stats=False": not layer.track_running_stats or layer.running_mean is None,
        "momentum=None": layer.momentum is None,
    }
    missing = [option for option, chosen in options.items() if chosen]
    if missing:
        return missing[0]
    return "" if activated(layer) else departure(layer)


def _use_kernels(layer: nn.BatchNorm2d, kernels: Kernels) -> None:
    plain: Any = type(layer)
    kind: Any = _fused_class(FusedBatchNormAct2d, plain) if _has_activation(layer) else FUSED[plain]
    layer.__class__ = kind
    norm = cast(FusedBatchNorm2d, layer)
    norm.kernels = kernels
    if activated(norm) and _is(nn.ReLU, norm.act) and _is(nn.Identity, norm.drop):
        norm._forward_hooks.clear()
        norm.relu = True


def activated(layer: nn.Module) -> bool:
    """Return whether the only hook of a batch-norm layer is its activation, as in timm's BatchNormAct2d."""
    return list(layer._forward_hooks.values()) == [activate]


def _has_activation(layer: nn.Module) -> bool:
    return f"{type(layer).__module__}.{type(layer).__name__}" == "timm.layers.norm_act.BatchNormAct2d"


METHODS = ("forward", "__iter__", "__call__", "__reduce__", "__reduce_ex__")
"""Methods that a class derived from nn.Sequential has from it, if its layers can be fused."""


def _caller_of(module: nn.Module) -> "type[FusedCaller] | None":
    """Return how a module's batch-norm layers can be fused with the layers that it calls after them; None if not, or if
    they are already."""
    if isinstance(module, FusedCaller):
        return None
    name = f"{type(module).__module__}.{type(module).__name__}"
    if name in RESIDUAL_BLOCKS:
        return FusedResidualBlock
    if name in FOLLOWED:
        return FusedPairs
    kind = type(module)
    inherits = isinstance(module, nn.Sequential) and all(
        getattr(kind, method) is getattr(nn.Sequential, method) for method in METHODS
    )
    return FusedSequential if inherits else None


@cache
def _fused_class(kind: Any, plain: Any) -> type[nn.Module]:
    """Return the class derived from `plain` that computes as `kind`."""

    @wraps(plain.forward)  # whose arguments tracers read
    def forward(module: Any, *inputs: Any, **named: Any) -> Any:
        return kind.forward(module, *inputs, **named)

    about = {"plain": plain, "__module__": plain.__module__, "__doc__": plain.__doc__, "forward": forward}
    return type(plain.__name__, (kind, plain), about)


def _without_values(kind: Any, plain: Any) -> nn.Module:
    return object.__new__(_fused_class(kind, plain))


def _is(kind: type[nn.Module], layer: Any) -> bool:
    """Return whether a layer is of exactly this class and may be computed without calling it."""
    return type(layer) is kind and is_silent(layer)


def _is_fused(norm: Any) -> bool:
    return type(norm) in FUSED.values() and is_silent(norm) and not norm.relu


class FusedCaller(Native):
    """Base class of modules that compute some of their layers together."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and store the class, which has no name in a module, by what it was made of."""
        kind = next(base for base in type(self).__mro__ if base in CALLERS)
        reduced: Any = super().__reduce_ex__(protocol)
        return (_without_values, (kind, self.plain), *reduced[2:])

    @classmethod
    def has_norms(cls, module: nn.Module) -> bool:
        """Return whether a module has batch-norm layers that could be fused with others."""
        raise NotImplementedError

    @classmethod
    def reasons(cls, module: nn.Module) -> list[str]:
        """Return why layers of a module cannot be fused now, one reason for each group of layers."""
        raise NotImplementedError


class FusedPairs(FusedCaller):
    """A module with pairs of children, listed in FOLLOWED, of which the second gets the first's outputs and nobody else
    has them: batch-norm and ReLU, or residual blocks."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Compute what the plain module does, with native layers in the place of pairs."""
        if not (runs_eagerly() and calls_are_plain(nn.ReLU) and methods_are_plain(self, *self.methods())):
            return self.plain.forward(self, *inputs, **named)
        return self._with(self._together(), *inputs, **named)

    def _with(self, children: dict[str, Callable[[Tensor], Tensor]], *inputs: Any, **named: Any) -> Any:
        """Compute the plain forward with other children: it sees the same attributes, but for these."""
        view: Any = object.__new__(self.plain)  # not the class's own __new__, which may need arguments or count
        vars(view).update(vars(self), _modules={**self._modules, **children})
        return self.plain.forward(view, *inputs, **named)

    def _together(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return by name what computes the layers of fused pairs."""
        found: dict[str, Callable[[Tensor], Tensor]] = {}
        recomputes = getattr(self, "grad_checkpointing", False)  # in timm's networks: the blocks themselves are called
        for first, second in self.pairs(self):
            made, used = self._modules[first], self._modules[second]
            if _is_fused(made) and _is(nn.ReLU, used):
                found |= {first: partial(cast(nn.Module, made), relu=True), second: _same}
            elif not recomputes and _block_at(made, -1) and (block := _block_at(used, 0)) and block.keeps_nothing():
                found[second] = partial(_used_twice, cast(Any, used))  # the first block adds up its outputs' gradients
        return found

    @classmethod
    def methods(cls) -> list[str]:
        """Return the names of methods that call the children."""
        return [name for name, method in vars(cls.plain).items() if isfunction(method)]

    @staticmethod
    def pairs(module: nn.Module) -> list[tuple[str, str]]:
        """Return the names of children that are called one after the other."""
        plain = module.plain if isinstance(module, Native) else type(module)
        return [
            pair for pair in FOLLOWED[f"{plain.__module__}.{plain.__name__}"] if set(pair) <= module._modules.keys()
        ]

    @classmethod
    def has_norms(cls, module: nn.Module) -> bool:
        """Return whether there is a pair of native batch-norm and ReLU."""
        return bool(cls._relus(module))

    @classmethod
    def reasons(cls, module: nn.Module) -> list[str]:
        """Return a reason for each pair of native batch-norm and ReLU that is not fused."""
        return ["hooks of ReLU" for relu in cls._relus(module) if not is_silent(relu)]

    @classmethod
    def _relus(cls, module: nn.Module) -> list[nn.ReLU]:
        """Return the ReLUs that follow native batch-norm layers."""
        pairs = [(module._modules[first], module._modules[second]) for first, second in cls.pairs(module)]
        return [relu for norm, relu in pairs if type(norm) in FUSED.values() and type(relu) is nn.ReLU]


def _same(images: Tensor) -> Tensor:
    return images


class FusedSequential(FusedPairs):
    """An nn.Sequential, or a class derived from it without a forward of its own."""

    @classmethod
    def methods(cls) -> list[str]:
        """Return the names of methods that call the children."""
        return ["forward", "__iter__"]

    @staticmethod
    def pairs(module: nn.Module) -> list[tuple[str, str]]:
        """Return the names of neighbors."""
        return list(pairwise(module._modules))

    @classmethod
    def has_norms(cls, module: nn.Module) -> bool:
        """Return whether there is a pair of native batch-norm and ReLU, or one of residual blocks."""
        blocks = [
            isinstance(child, FusedResidualBlock) or _caller_of(child) is FusedResidualBlock
            for child in module.children()
        ]
        return super().has_norms(module) or sum(blocks) > 1

    def fused(self, images: Tensor, identity: Tensor) -> Tensor:
        """Compute the layers, of which the first is a residual block; `identity` is an alias of the images."""
        first, block = next(iter(self._modules.items()))
        children = self._together() | {first: partial(cast(Any, block).fused, identity=identity)}
        return cast(Tensor, self._with(children, images))


def _used_twice(module: "FusedSequential | FusedResidualBlock", images: Tensor) -> Tensor:
    return module.fused(images, second_use(images))


def _block_at(module: Any, end: int) -> "FusedResidualBlock | None":
    """Return a residual block, or that at one end of an nn.Sequential, if its outputs or images are seen by no hook."""
    if not isinstance(module, FusedCaller) or not is_silent(module):
        return None
    if isinstance(module, FusedSequential) and methods_are_plain(module, *module.methods()):
        layers = [*module._modules.values()]
        return _block_at(layers[end], end) if layers else None
    return module if isinstance(module, FusedResidualBlock) else None


class FusedResidualBlock(FusedCaller):
    """BasicBlock or Bottleneck of torchvision or timm."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """(N, C, H, W) -> (N, C', H', W')."""
        if len(inputs) != 1 or named or not runs_eagerly() or self.reasons(self):
            return self.plain.forward(self, *inputs, **named)
        return self.fused(*inputs, *inputs)

    def keeps_nothing(self) -> bool:
        """Return whether the block can be fused, and no layer that its images are given to can keep them, of which it
        might ask the gradient."""
        if self.reasons(self):
            return False
        given = [self.conv1, *(() if self.downsample is None else cast(nn.Module, self.downsample).modules())]
        return all(type(layer) in KEEP_NOTHING and is_silent(cast(nn.Module, layer)) for layer in given)

    def fused(self, images: Tensor, identity: Tensor) -> Tensor:
        """Compute the block; `identity` are the images, or an alias of them."""
        last = _layers_of(self).convolutions
        out = images
        for i in range(1, last):
            out = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(out), relu=True)
        out = getattr(self, f"conv{last}")(out)
        if self.downsample is not None:
            identity = cast(nn.Module, self.downsample)(identity)
        return cast(Tensor, getattr(self, f"bn{last}")(out, identity, relu=True))

    @classmethod
    def has_norms(cls, module: nn.Module) -> bool:
        """Return whether there are batch-norm layers."""
        return any(isinstance(child, nn.BatchNorm2d) for child in module.children())

    @classmethod
    def reasons(cls, module: nn.Module) -> list[str]:
        """Return why the block cannot be fused now: its layers are others than as built, or have hooks."""
        plain = module.plain if isinstance(module, Native) else type(module)
        if not calls_are_plain(nn.ReLU, nn.Identity, plain):
            return ["hooks of all modules"]
        layers, children = _layers_of(module), module._modules
        norms = [children.get(f"bn{i}") for i in range(1, layers.convolutions + 1)]
        relus = [children.get(name) for name in layers.relus]
        others = [getattr(module, name, None) for name in layers.absent]
        if not all(type(norm) in FUSED.values() for norm in norms):
            return ["batch-norm that stays torch's"]
        if not all(type(relu) is nn.ReLU for relu in relus):
            return ["another activation"]
        if not all(other is None or type(other) is nn.Identity for other in others):
            return ["more layers"]
        seen = [*norms, *relus, *(other for other in others if other is not None)]
        return [] if all(is_silent(cast(nn.Module, each)) for each in seen) else ["hooks of its layers"]


class FusedBatchNormAct2d(FusedCaller, FusedBatchNorm2d):
    """timm's BatchNormAct2d, which has a dropout and an activation as children."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """(N, C, H, W) -> (N, C, H, W)."""
        if not self._supports(x, None):
            return cast(Tensor, self.by_torch(x))
        act, drop = (self.get_submodule(name) for name in ("act", "drop"))
        if _is(nn.ReLU, act) and _is(nn.Identity, drop) and calls_are_plain(nn.ReLU, nn.Identity):
            return super().forward(x, relu=True)
        return cast(Tensor, act(drop(super().forward(x))))

    @classmethod
    def has_norms(cls, module: nn.Module) -> bool:
        """Return False: the children are no batch-norm layers."""
        return False


CALLERS = (FusedSequential, FusedPairs, FusedResidualBlock, FusedBatchNormAct2d)

KEEP_NOTHING = (
    *(nn.Sequential, _fused_class(FusedSequential, nn.Sequential), nn.Identity, nn.AvgPool2d),
    *(*CONVOLUTIONS, *FUSED, *FUSED.values()),
)
"""Classes of layers that keep no inputs, except those that autograd saves."""


def _layers_of(block: nn.Module) -> ResidualLayers:
    plain = block.plain if isinstance(block, Native) else type(block)
    return RESIDUAL_BLOCKS[f"{plain.__module__}.{plain.__name__}"]
