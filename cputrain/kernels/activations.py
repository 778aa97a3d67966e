"""Activations that native batch-norm computes: which layers and functions of torch they are."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from cputrain.kernels.evidence import is_silent


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation by name, with LeakyReLU's slope for negative values."""

    name: str
    slope: float = 0.0

    @property
    def number(self) -> int:
        """Its number in native/batchnorm_relu.cpp."""
        return KINDS[self.name].number

    @property
    def keeps_output(self) -> bool:
        """Whether the outputs show the derivative, as their inputs do."""
        return KINDS[self.name].keeps_output

    @property
    def costly(self) -> bool:
        """Whether its gradients take longer to compute than to read and write."""
        return KINDS[self.name].costly

    def __call__(self, values: Tensor) -> Tensor:
        """Return the activation of values, by torch's operators."""
        return KINDS[self.name].function(values, self.slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """An activation in torch: its layer with the attributes that decide what it computes, and its functions, of which
    `has_slope` is whether they have LeakyReLU's as second argument."""

    number: int
    layer: type[nn.Module]
    function: Callable[[Tensor, float], Tensor]
    functions: tuple[Callable[..., Tensor], ...]
    attributes: tuple[tuple[str, float], ...] = ()
    has_slope: bool = False
    keeps_output: bool = True
    costly: bool = False


KINDS = {
    "relu": _Kind(
        number=1,
        layer=nn.ReLU,
        function=lambda values, _: functional.relu(values),
        functions=(functional.relu, functional.relu_, torch.relu, torch.relu_),
    ),
    "relu6": _Kind(
        number=2,
        layer=nn.ReLU6,
        function=lambda values, _: functional.relu6(values),
        functions=(functional.relu6,),
        attributes=(("min_val", 0.0), ("max_val", 6.0)),
    ),
    "leaky_relu": _Kind(
        number=3,
        layer=nn.LeakyReLU,
        function=functional.leaky_relu,
        functions=(functional.leaky_relu,),
        has_slope=True,
    ),
    "hardswish": _Kind(
        number=4,
        layer=nn.Hardswish,
        function=lambda values, _: functional.hardswish(values),
        functions=(functional.hardswish,),
        keeps_output=False,
    ),
    "silu": _Kind(
        number=5,
        layer=nn.SiLU,
        function=lambda values, _: functional.silu(values),
        functions=(functional.silu,),
        keeps_output=False,
        costly=True,
    ),
}
LAYERS: tuple[type[nn.Module], ...] = tuple(kind.layer for kind in KINDS.values())
"""Classes of layers that are activations."""
RELU = Activation("relu")
METHODS = ("relu", "relu_")
SLOPE = 0.01  # of torch's functional.leaky_relu by default


def activation_of_layer(layer: Any) -> Activation | None:
    """Return which activation a layer is that may be computed without calling it, None if it is none."""
    for name, kind in KINDS.items():
        if type(layer) is kind.layer and is_silent(layer):
            if any(getattr(layer, attribute) != value for attribute, value in kind.attributes):
                return None
            return _with_slope(name, layer.negative_slope) if kind.has_slope else Activation(name)
    return None


def activation_of(node: fx.Node, before: fx.Node, layer: nn.Module | None) -> Activation | None:
    """Return which activation of the outputs of the node before a node computes, which may call a layer; None if it is
    none."""
    if node.args[:1] != (before,):
        return None
    if layer is not None:
        return activation_of_layer(layer) if len(node.args) == 1 and not node.kwargs else None
    if node.op == "call_method":
        return RELU if node.target in METHODS and len(node.args) == 1 and not node.kwargs else None
    for name, kind in KINDS.items():
        if node.op == "call_function" and any(operator.is_(node.target, function) for function in kind.functions):
            options = dict(zip(("negative_slope", "inplace")[not kind.has_slope :], node.args[1:], strict=False))
            options |= node.kwargs
            slope = options.pop("negative_slope", SLOPE)
            known = options.keys() <= {"inplace"} and isinstance(options.get("inplace", False), bool)
            return (_with_slope(name, slope) if kind.has_slope else Activation(name)) if known else None
    return None


def _with_slope(name: str, slope: Any) -> Activation | None:
    """Return the activation if its slope keeps the sign of values, as the backward pass needs it."""
    return Activation(name, float(slope)) if isinstance(slope, int | float) and 0 < slope < float("inf") else None
