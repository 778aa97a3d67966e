"""The kernels below torch's operators: one record each, and its comparison with float64."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cputrain.kernels.build import CPUINFO

# Largest error, of the largest value: in float32 as torch's own, in bfloat16 a unit in the last place.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call that is compared: `function` of tensors with these shapes, its result and its gradients."""

    label: str
    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel: its name in native/operators.cpp, what it covers in words, on which CPUs, and the calls that check it.

    The rule by shape stands in native/*_operators.hpp, beside the measurement that is its reason.
    """

    name: str
    covers: str
    cases: tuple[Case, ...]
    applies: Callable[[], bool] = lambda: True
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


def has_avx512() -> bool:
    """Whether torch computes bfloat16 by oneDNN on this CPU."""
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


def has_amx() -> bool:
    """Whether torch multiplies bfloat16 matrices by AMX on this CPU."""
    return has_avx512() and torch.cpu._is_amx_tile_supported()


def is_intel() -> bool:
    """Whether this is a CPU of Intel, for which MKL, with which torch multiplies float32 matrices, is made."""
    return "GenuineIntel" in CPUINFO.read_text(encoding="utf-8")


def wrong_result(kernel: Kernel, calls: Callable[[], int]) -> str:
    """Return what is wrong with a registered kernel on this CPU, or ""; `calls` returns how many calls it computed."""
    generator = torch.Generator().manual_seed(1)
    before = calls()
    for dtype in kernel.dtypes:
        for case in kernel.cases:
            tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in case.shapes]
            doubles = [value.double() for value in tensors]
            scale = torch.randn(case.function(*doubles).shape, generator=generator).to(dtype)
            results = _results(case, tensors, scale), _results(case, doubles, scale.double())
            for made, value in zip(*results, strict=True):
                error = float((made.double() - value).abs().max() / value.abs().max())
                if not error <= TOLERANCE[dtype]:
                    return (
                        f"{case.label} in {str(dtype)[6:]} differs from float64 by {error:.1e}, more than "
                        f"{TOLERANCE[dtype]:.1e}"
                    )
    return "" if calls() > before else f"torch {torch.__version__} does not call it"


def _results(case: Case, tensors: list[Tensor], scale: Tensor) -> tuple[Tensor, ...]:
    """Return the result, and the gradients of the tensors for the result's gradient `scale`."""
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        leaves = [value.detach().requires_grad_() for value in tensors]
        made = case.function(*leaves)
        return made.detach(), *torch.autograd.grad(made, leaves, scale)


def _convolution(
    label: str,
    channels: tuple[int, int],
    size: int,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    sides: tuple[int, int] = (13, 11),
) -> Case:
    def function(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        images = x.contiguous(memory_format=torch.channels_last)
        return functional.conv2d(images, w, bias, stride, size // 2, dilation, groups)

    inputs, outputs = channels
    weights = (outputs, inputs // groups, size, size)
    shapes = ((2, inputs, *sides), weights, (outputs,))
    return Case(label=f"a {size} x {size} {label} of stride {stride}", function=function, shapes=shapes)


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    kind = torch.promote_types(x.dtype, torch.float32)
    images = x.contiguous(memory_format=torch.channels_last)
    return functional.batch_norm(images, None, None, weight.to(kind), bias.to(kind), training=True)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value)


def _product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


TABLE = (
    Kernel(
        name="depthwise",
        covers="depthwise convolutions",
        # Each way through the code, and one of torch's: kernel size, stride and dilation.
        cases=tuple(
            _convolution("depthwise convolution", (24, 24), *case, groups=24)
            for case in ((3, 1, 1), (3, 2, 1), (5, 1, 1), (5, 2, 2), (7, 1, 1))
        ),
    ),
    Kernel(
        name="grouped",
        covers="grouped convolutions",
        dtypes=(torch.float32, torch.bfloat16) if has_amx() else (torch.float32,),
        cases=(
            *(
                _convolution(f"convolution of groups of {each}", (4 * each,) * 2, 3, stride, groups=4)
                for each in (4, 8, 16, 24)
                for stride in (1, 2)
            ),
            _convolution("convolution of 16 groups of 4", (64, 64), 3, groups=16, sides=(27, 21)),
        ),
    ),
    Kernel(
        name="pointwise",
        covers="1 x 1 convolutions as products",
        applies=lambda: has_avx512() and is_intel(),
        dtypes=(torch.float32,),
        cases=tuple(_convolution("convolution", (12, 20), 1, stride) for stride in (1, 2)),
    ),
    Kernel(
        name="batch-norm",
        covers="batch-norm in training",
        cases=tuple(
            Case(label=f"batch-norm of {shape[1]} channels", function=_batch_norm, shapes=(shape, *(shape[1:2],) * 2))
            for shape in ((2, 24, 13, 11), (3, 40, 1, 5), (5, 130, 7, 7), (4, 67, 64, 65))
        ),
    ),
    Kernel(
        name="bfloat16 in float32",
        covers="bfloat16 in float32 as this CPU has no AVX-512",
        applies=lambda: not has_avx512(),
        dtypes=(torch.bfloat16,),
        cases=(
            _convolution("convolution", (12, 8), 3),
            Case(label="a product", function=_product, shapes=((17, 33), (33, 9))),
            Case(label="a batch of products", function=_product, shapes=((3, 17, 33), (3, 33, 9))),
            Case(label="attention", function=_attention, shapes=((2, 3, 17, 16),) * 3),
        ),
    ),
    Kernel(
        name="bfloat16 on AMX",
        covers="weight gradients, 1 x 1 convolutions and attention's gradients in bfloat16 on AMX",
        applies=has_amx,
        dtypes=(torch.bfloat16,),
        cases=(
            *(_convolution("convolution", (40, 24), 1, stride) for stride in (1, 2)),
            Case(label="a product", function=_product, shapes=((150, 280), (280, 36))),
            Case(label="attention", function=_attention, shapes=((2, 3, 70, 16),) * 3),
        ),
    ),
    Kernel(
        name="unwritten by oneDNN",
        covers="bfloat16 results that oneDNN leaves unwritten",
        applies=has_avx512,
        dtypes=(torch.bfloat16,),
        cases=(_convolution("convolution of one pixel", (12, 8), 3, 2, sides=(1, 1)),),
    ),
)
