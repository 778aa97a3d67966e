"""Modules that compute batch-norm, additions and activations as one layer, as long as the results are the same."""

import linecache
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn

from cputrain.affinity.errors import RunError
from cputrain.kernels.activations import LAYERS, Activation, activation_of_layer
from cputrain.kernels.batchnorm import FusedBatchNorm2d, residual_alias
from cputrain.kernels.evidence import Native, calls_are_plain, is_silent, methods_are_plain, runs_eagerly
from cputrain.kernels.norms import activate
from cputrain.kernels.tracing import Read, Reference

SOLE_USER = "_is_sole_user"
"""Keyword by which a module whose forward pass is fused is told that nothing else has its input."""


def activated(layer: nn.Module) -> bool:
    """Return whether the only hook of a batch-norm layer is its activation, as in timm's BatchNormAct2d."""
    return list(layer._forward_hooks.values()) == [activate]


def is_exactly(kind: type[nn.Module], layer: Any) -> bool:
    """Return whether a layer is of exactly this class and may be computed without calling it."""
    return type(layer) is kind and is_silent(layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A module that a fused forward pass does not call as its own one does: path, classes that it may have, whether it
    is a batch-norm layer, and the activation that it is."""

    path: tuple[str, ...]
    kinds: tuple[type[nn.Module], ...]
    norm: bool = False
    activation: Activation | None = None

    def obstacle(self, root: nn.Module) -> str:
        """Return why the module must be called, "" if not."""
        module: Any = root
        for name in self.path:
            module = module._modules.get(name)
            if module is None:
                return f"another {self.path[0]}"
        kind: Any = type(module)
        if isinstance(module, FusedModule):
            kind = FusedModule if FusedModule in self.kinds else module.plain
        if kind not in self.kinds:
            return "batch-norm that stays torch's" if self.norm else f"another {'.'.join(self.path)}"
        if not is_silent(module):
            return f"hooks of {'.'.join(self.path)}"
        if self.activation and activation_of_layer(module) != self.activation:
            return f"another {'.'.join(self.path)}"
        return f"an activation in {'.'.join(self.path)}" if self.norm and module.activation else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """A module's forward pass with fused layers as Python code, and what must hold so that it computes the same.

    `inputs` is the number of arguments, of which the first is a tensor if `tensors`. `reuses` is whether the code takes
    an alias of its only input for the second use, `reusable` whether such an alias of its outputs may be asked for.
    """

    source: str
    functions: tuple[tuple[str, Reference], ...]
    inputs: int
    tensors: bool
    reuses: bool
    reusable: bool
    parts: tuple[Part, ...]
    reads: tuple[Read, ...]
    containers: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    methods: tuple[str, ...]

    def obstacle(self, module: nn.Module) -> str:
        """Return why the code cannot be used now, "" if it can."""
        if not (
            calls_are_plain(*LAYERS, nn.Identity, nn.Sequential)
            and nn.Module.__call__ is nn.Module._wrapped_call_impl  # which profilers replace, and traces
            and methods_are_plain(cast(Native, module), *self.methods)
        ):
            return "hooks of all modules, or replaced methods"
        if changed := next((read.name for read in self.reads if not read.still_holds(module)), ""):
            return f"another {changed}"
        for path, names in self.containers:
            container: Any = module
            for name in path:
                container = container._modules[name]
            if tuple(container._modules) != names:
                return "other layers"
        return next(filter(None, (part.obstacle(module) for part in self.parts)), "")

    def run(self, module: nn.Module, inputs: tuple[Any, ...], *, sole_user: bool) -> Any:
        """Compute the forward pass; `sole_user` is whether nothing else has the only input.

        Raises RunError if a layer that it calls changes a value that the module's own forward pass would read later.
        """
        if self.reuses:
            inputs = (*inputs, residual_alias(inputs[0]) if sole_user else inputs[0])
        outputs = _compiled(self.source, self.functions)(module, *inputs)
        for read in self.reads:
            if not read.still_holds(module):
                raise RunError(
                    f"{type(module).__name__}.forward reads {read.name}, which a layer changes during it: call "
                    "cputrain.restore(model), or train with engine=eager"
                )
        return outputs


@cache
def _compiled(source: str, functions: tuple[tuple[str, Reference], ...]) -> Callable[..., Any]:
    """Return the function that a Fusion's source defines."""
    name = f"<cputrain fused forward {hash((source, functions)):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for tracebacks
    space: dict[str, Any] = {
        "torch": torch,
        "device": torch.device,
        "inf": math.inf,
        "nan": math.nan,
        **{name: reference.function for name, reference in functions},
    }
    exec(compile(source, name, "exec"), space)
    return cast(Callable[..., Any], space["forward"])


@cache
def derived_class(kind: Any, plain: Any) -> type[nn.Module]:
    """Return the class derived from `plain` that computes as `kind`."""

    @wraps(plain.forward)  # whose arguments tracers read
    def forward(module: Any, *inputs: Any, **keywords: Any) -> Any:
        return kind.forward(module, *inputs, **keywords)

    about = {"plain": plain, "__module__": plain.__module__, "__doc__": plain.__doc__, "forward": forward}
    return type(plain.__name__, (kind, plain), about)


def _without_values(kind: Any, plain: Any) -> nn.Module:
    return object.__new__(derived_class(kind, plain))


class _Derived(Native):
    """Base class of native classes that are derived from the plain class of a layer."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and store the class, which has no name in a module, by what it was made of."""
        reduced: Any = super().__reduce_ex__(protocol)
        if self.plain.__reduce__ is not object.__reduce__:  # makes a module of the plain class
            return reduced
        kind = next(base for base in type(self).__mro__ if base in (FusedModule, FusedBatchNormAct2d))
        return (_without_values, (kind, self.plain), *reduced[2:])


class FusedModule(_Derived):
    """A module whose forward pass is computed with fused layers, as long as it then computes the same."""

    fusions: tuple[Fusion, ...] = ()

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Compute what the plain module does."""
        sole = keywords.pop(SOLE_USER, False)
        fusion = self.fusion_for(inputs) if runs_eagerly() and not keywords else None
        if fusion is None or fusion.obstacle(self):
            return self.plain.forward(self, *inputs, **keywords)
        return fusion.run(self, inputs, sole_user=sole)

    def fusion_for(self, inputs: tuple[Any, ...]) -> Fusion | None:
        """Return the fused forward pass for arguments of these classes."""
        are = {isinstance(value, Tensor) for value in inputs}
        fitting = (fusion for fusion in self.fusions if are == {fusion.tensors} and fusion.inputs == len(inputs))
        return None if any(value is None for value in inputs) else next(fitting, None)

    def undo(self) -> None:
        """Undo what was done to the layer when its class was replaced."""
        super().undo()
        vars(self).pop("fusions", None)


class FusedBatchNormAct2d(_Derived, FusedBatchNorm2d):
    """timm's BatchNormAct2d, which has a dropout and an activation as children."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """(N, C, H, W) -> (N, C, H, W)."""
        if not self._supports(x, None):
            return cast(Tensor, self.torch_fallback(x))
        act, drop = (self.get_submodule(name) for name in ("act", "drop"))
        activation = activation_of_layer(act)
        if activation and is_exactly(nn.Identity, drop) and calls_are_plain(type(act), nn.Identity):
            return super().forward(x, activation=activation.name, slope=activation.slope)
        return cast(Tensor, act(drop(super().forward(x))))
