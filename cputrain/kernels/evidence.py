"""What must hold so that a native layer computes what torch's layer would, of modules, tensors and torch's state.

All checks are made at each call, because hooks, options and tensors of a network may change during a training.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import isfunction
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import Proxy, _symbolic_trace
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

DTYPES = (torch.float32, torch.bfloat16)
"""Data types of feature maps that the kernels support; parameters are float32."""

VALUES: Any = {"dtype": torch.float32, "device": "cpu"}
"""Where the kernels read and write values other than feature maps, whatever torch's default dtype and device are."""

FUNCTIONS = ("batch_norm", "relu", "relu6", "hardtanh", "leaky_relu", "hardswish", "silu")
"""Functions of torch.nn.functional that kernels take the place of."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MEASURES = "_only_measures"

Hook = TypeVar("Hook", bound=Callable[..., Any])


class Native(nn.Module):
    """Base class of native layers, which replaces the class `plain` of a layer; `restore` undoes it."""

    plain: ClassVar[type[nn.Module]]

    def torch_fallback(self, images: Any) -> Any:
        """Compute the layer as its plain class does; in a trace by torch.fx record its call, as of torch's layers."""
        if not isinstance(images, Proxy):
            return self.plain.forward(self, images)
        tracer: Any = images.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(self), (images,), {})

    def undo(self) -> None:
        """Undo what was done to the layer when its class was replaced."""
        vars(self).pop("kernels", None)


def restore(network: nn.Module) -> None:
    """Give all layers of a network the classes back that they had before native ones replaced them."""
    for layer in network.modules():
        kind = type(layer)
        if not isinstance(layer, Native):
            continue
        if "plain" in vars(kind):
            layer.undo()
            layer.__class__ = cast(Any, layer.plain)
        elif parametrize.is_parametrized(layer):  # later: torch has derived a class for this layer from the native one
            layer.undo()
            kind.__bases__, kind.__name__ = (layer.plain,), f"Parametrized{layer.plain.__name__}"


def measuring(hook: Hook) -> Hook:
    """Mark a hook that needs no calls of layers which are computed as parts of others."""
    setattr(hook, MEASURES, True)
    return hook


def departure(module: nn.Module) -> str:
    """Return what a module has beside its class, such as hooks or a forward of its own; "" if it is as built."""
    kind = type(module)
    overrides = sorted(name for name in vars(module) if hasattr(kind, name) and name != "_compiled_call_impl")
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "compiled by itself"
    if overrides:
        return f"own {overrides[0]}"
    methods = {"forward", *(name for name, method in vars(kind).items() if isfunction(method))}
    if not all(is_as_written(kind, name) for name in methods):
        return "replaced methods of its class"
    return "" if is_silent(module) else "hooks"


def is_silent(module: nn.Module) -> bool:
    """Return whether nothing notices if a module's forward is computed without calling the module."""
    attributes = vars(module)
    if "forward" in attributes or attributes.get("_compiled_call_impl") is not None:
        return False
    return all(hasattr(hook, MEASURES) for name in HOOKS for hook in attributes[name].values())


def calls_are_plain(*kinds: type[nn.Module]) -> bool:
    """Return whether torch calls modules without hooks of all modules, and the forwards of `kinds` are as written."""
    hooked = modules._has_any_global_hook()  # type: ignore[no-untyped-call]
    return not hooked and all(is_as_written(kind, "forward") for kind in kinds)


def methods_are_plain(layer: Native, *names: str) -> bool:
    """Return whether methods of a native layer's plain class, and those that they override, are as written, and the
    layer has none of its own."""
    if vars(layer).keys() & set(names):
        return False
    bases = layer.plain.__mro__[: layer.plain.__mro__.index(nn.Module)]
    return all(is_as_written(kind, name) for kind in bases for name in names if name in vars(kind))


def is_as_written(kind: type, name: str) -> bool:
    """Return whether a method is the one in the source of its class, not a function assigned to the class later."""
    return _is_as_written(kind, name, getattr(kind, name))


@cache
def _is_as_written(kind: type, name: str, method: Any) -> bool:
    owner = next(base for base in kind.__mro__ if name in vars(base))
    return is_in_source(method, owner.__module__) and method.__qualname__ == f"{owner.__qualname__}.{name}"


def is_in_source(function: Any, module: str) -> bool:
    """Return whether a function is from the source of the Python module of this name: its file, or input if it has
    none, as in a notebook."""
    if not isfunction(function) or hasattr(function, "__wrapped__"):
        return False
    source = getattr(sys.modules.get(module), "__file__", None)
    if source is None:
        return function.__module__ == module
    return bool(function.__code__.co_filename == source)


def runs_eagerly() -> bool:
    """Return whether torch computes values here and now, and nothing but autograd follows its operators: no compiler,
    tracer, functional transform, forward derivative, mode or other function in the place of torch's."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or _symbolic_trace._is_fx_tracing_flag
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
        or not all(isinstance(mode, DeviceContext) for mode in _modes())
        or replaced_functions()
    )


def replaced_functions() -> list[str]:
    """Return the names of functions of torch.nn.functional that others replaced, as profilers do."""
    return list(_replaced(functional.conv2d, *(getattr(functional, name) for name in FUNCTIONS)))


@cache
def _replaced(conv2d: Any, *others: Any) -> tuple[str, ...]:
    names = tuple(name for name, function in zip(FUNCTIONS, others, strict=True) if not _is_functional(function))
    return names if conv2d is torch.conv2d else ("conv2d", *names)


def _is_functional(function: Any) -> bool:
    return isfunction(function) and function.__code__.co_filename == functional.__file__


def _modes() -> list[Any]:
    return _get_current_function_mode_stack()  # type: ignore[no-untyped-call,no-any-return]


def is_dense(tensor: Any) -> bool:
    """Return whether a value is an ordinary tensor whose memory on the CPU has its values, at its strides."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and torch._C._has_storage(tensor)  # not so of batches of vmap
        and not tensor.is_neg()  # a view of values with the opposite sign
        and tensor.data_ptr() != 0
    )


def are_maps(value: Any, channels: int) -> bool:
    """Return whether a value is feature maps, (N, channels, H, W), channels-last in memory, of a dtype in DTYPES."""
    return (
        is_dense(value)
        and value.dtype in DTYPES
        and value.dim() == 4
        and value.shape[1] == channels
        and value.numel() > 0
        and value.is_contiguous(memory_format=torch.channels_last)
    )


def is_vector(value: Any, size: int) -> bool:
    """Return whether a value is a float32 tensor of shape (size,) without gaps."""
    return is_dense(value) and value.dtype == torch.float32 and value.shape == (size,) and value.is_contiguous()


def is_gradient_of(value: Any, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Return whether a value can be converted to maps of this shape and dtype by copying."""
    return is_dense(value) and value.shape == shape and value.dtype == dtype


def torch_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], needed: Sequence[bool], gradient: Tensor
) -> list[Tensor | None]:
    """Return the gradients of the `needed` inputs, None for others, by torch's operators.

    `inputs` are tensors that a backward pass has saved. If it runs with create_graph=True, the gradients can be
    differentiated again.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        outputs = function(*inputs)
        present = [need and value is not None for value, need in zip(inputs, needed, strict=True)]
        of_inputs = [cast(Tensor, value) for value, has in zip(inputs, present, strict=True) if has]
        gradients = iter(torch.autograd.grad(outputs, of_inputs, gradient, create_graph=again))
    return [next(gradients) if has else None for has in present]


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restore the generators of torch, NumPy and Python at the end."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)
