"""3 x 3 convolutions by Winograd's algorithm F(4x4, 3x3) with native kernels, and the check of the kernels.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016, arXiv:1509.09308), section 4. A tile of 4 x 4
outputs takes 36 multiplications instead of 144. Sums are float32; errors are 1e-5 of the largest value, compared to
1e-6 with the direct algorithm and 1e-3 with TF32.
"""

import ctypes
import math
import threading
import time
from collections.abc import Callable, Mapping
from ctypes import POINTER, byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cputrain.affinity.errors import RunError
from cputrain.models.batchnorm_relu import NATIVE, library_options, library_path
from cputrain.native_build import NativeExtension, ensure_compiled, loading

SOURCES = tuple(NATIVE / name for name in ("winograd.cpp", "winograd.hpp", "rows.hpp", "values.hpp"))
DTYPES = (torch.float32, torch.bfloat16)
CHANNELS = 16  # channels must be a multiple of this
LARGE = 4 << 20  # bytes of transformed weights that exceed any L2 cache


class _Layer(ctypes.Structure):
    """struct Convolution of winograd.cpp: input sizes, channels, padding, precision, threads and tiles per block."""

    _fields_ = (
        *((name, c_size_t) for name in ("images", "height", "width", "in_channels", "out_channels", "padding")),
        ("bfloat16", c_int),
        ("threads", c_int),
        ("tiles", c_size_t),
    )


class WinogradKernels:
    """The compiled functions. Images are (N, C, H, W), channels-last in memory, float32 or bfloat16; weights
    (K, C, 3, 3) are channels-last and float32.

    Each calling thread keeps scratch memory of the size of its largest layer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with loading(path, EXTENSION.requested_by, EXTENSION.alternative):
            native = ctypes.CDLL(str(path))
        layer, pointer = POINTER(_Layer), c_void_p

        def function(name: str, result: Any, *arguments: Any) -> Any:
            found = getattr(native, f"winograd_{name}")
            found.argtypes, found.restype = arguments, result
            return found

        self._scratch = function("scratch", c_size_t, layer, c_int)
        self._weights = function("weights", None, pointer, c_size_t, c_size_t, c_int, c_int, pointer)
        self._weights_size = function("weights_size", c_size_t, c_size_t, c_size_t)
        self._forward = function("forward", None, layer, *(pointer,) * 3, c_int, *(pointer,) * 2)
        self._weight_gradient = function("weight_gradient", None, layer, *(pointer,) * 4)
        self._kept = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.path,)  # copies of networks share the library

    def transform(self, weight: Tensor, *, mirrored: bool = False, out: Tensor | None = None) -> Tensor:
        """Return transformed weights for `convolve`, 4 times as large; `mirrored` ones compute the input gradient."""
        outputs, inputs = weight.shape[:2]
        size = self._weights_size(outputs, inputs)
        made = torch.empty(size) if out is None else out
        threads = torch.get_num_threads()
        self._weights(weight.data_ptr(), outputs, inputs, mirrored, threads, made.data_ptr())
        return made

    def convolve(
        self, images: Tensor, transformed: Tensor, channels: int, padding: int, bias: Tensor | None, *, relu: bool
    ) -> Tensor:
        """(N, C, H, W) -> (N, `channels`, H', W'), plus bias (`channels`,) float32 if given, then ReLU if `relu`."""
        layer = _layer(images, channels, padding)
        count, _, height, width = images.shape
        shape = count, channels, height + 2 * padding - 2, width + 2 * padding - 2
        made = torch.empty(shape, dtype=images.dtype, memory_format=torch.channels_last)
        scratch = self._memory("scratch", self._scratch(byref(layer), 0) // 4)
        added = None if bias is None else bias.data_ptr()
        at = images.data_ptr(), transformed.data_ptr(), added
        self._forward(byref(layer), *at, relu, made.data_ptr(), scratch.data_ptr())
        return made

    def output(self, images: Tensor, weight: Tensor, padding: int, bias: Tensor | None = None) -> Tensor:
        """Convolve images (N, C, H, W) with weight (K, C, 3, 3)."""
        channels = weight.shape[0]
        return self.convolve(images, self._for_once(weight, mirrored=False), channels, padding, bias, relu=False)

    def input_gradient(self, gradient: Tensor, weight: Tensor, padding: int) -> Tensor:
        """Return the gradient of the images: the outputs' gradient convolved with the mirrored weights."""
        channels = weight.shape[1]
        return self.convolve(gradient, self._for_once(weight, mirrored=True), channels, 2 - padding, None, relu=False)

    def weight_gradient(self, images: Tensor, gradient: Tensor, padding: int) -> Tensor:
        """Return the gradient of the weights, (K, C, 3, 3) float32, from images and the outputs' gradient."""
        layer = _layer(images, gradient.shape[1], padding, gradient=True)
        made = torch.empty((layer.out_channels, layer.in_channels, 3, 3), memory_format=torch.channels_last)
        scratch = self._memory("scratch", self._scratch(byref(layer), 1) // 4)
        at = images.data_ptr(), gradient.data_ptr(), made.data_ptr(), scratch.data_ptr()
        self._weight_gradient(byref(layer), *at)
        return made

    def _for_once(self, weight: Tensor, *, mirrored: bool) -> Tensor:
        """Return transformed weights in a buffer that the next call overwrites."""
        size = self._weights_size(*weight.shape[:2])
        return self.transform(weight, mirrored=mirrored, out=self._memory("weights", size))

    def _memory(self, name: str, floats: int) -> Tensor:
        """Return the calling thread's buffer, which is kept because each new page costs 0.25 us in the kernel."""
        found: Tensor | None = getattr(self._kept, name, None)
        if found is None or found.numel() < floats:
            found = torch.empty(floats)
            setattr(self._kept, name, found)
        return found


def _layer(images: Tensor, channels: int, padding: int, *, gradient: bool = False) -> _Layer:
    count, inputs, height, width = images.shape
    sizes = count, height, width, inputs, channels, padding
    return _Layer(
        *sizes, images.dtype == torch.bfloat16, torch.get_num_threads(), _tiles(inputs * channels, gradient=gradient)
    )


def _tiles(products: int, *, gradient: bool) -> int:
    """Return the number of tiles per block for a layer with `products` = input x output channels.

    Small blocks keep the transformed tiles in a core's cache. Blocks are larger if the weights do not fit there, which
    are read once per block, and for weight gradients, whose sums over tiles are read and written once per block.
    """
    transformed = 36 * 4 * products
    if gradient:
        return 48 if transformed <= LARGE else 192
    return 12 if transformed <= LARGE else 48 if transformed <= 4 * LARGE else 192


def command_line(cxx: str, output: Path) -> tuple[str, ...]:
    """Return the compiler's command line."""
    return (cxx, *library_options(), "-ffp-contract=fast", str(SOURCES[0]), "-o", str(output))


EXTENSION = NativeExtension(
    title="the Winograd kernels",
    requested_by="engine=native",
    alternative="set engine=eager",
    argv=command_line,
)


def load_winograd(env: Mapping[str, str]) -> WinogradKernels:
    """Load the kernels, compiling them if necessary, and check them against formulas.

    Raises InputError if there is no compiler; RunError if it fails, or if a value differs by more than rounding because
    of a broken compiler or another CPU's code.
    """
    path = library_path("winograd", SOURCES, command_line("", Path()), env)
    kernels = _load(ensure_compiled(EXTENSION, path, env))
    if wrong := _difference(kernels):
        raise RunError(
            f"engine=native: the Winograd kernels give wrong results ({wrong}): remove {path.parent} and set CXX to "
            "another compiler"
        )
    return kernels


@cache
def _load(path: Path) -> WinogradKernels:
    return WinogradKernels(path)


SHAPE = (2, 16, 9, 6)  # with partial tiles at two edges
OUTPUTS = 80  # a full panel of columns and a partial one
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # error relative to the largest value, 10 and 5 times rounding


@cache
def _difference(kernels: WinogradKernels) -> str:
    """Describe the first wrong result, "" if all are correct."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SHAPE, generator=generator).to(memory_format=torch.channels_last)
    weight = torch.randn((OUTPUTS, SHAPE[1], 3, 3), generator=generator).to(memory_format=torch.channels_last)
    gradient = torch.randn((SHAPE[0], OUTPUTS, *SHAPE[2:]), generator=generator).to(memory_format=torch.channels_last)
    for dtype in DTYPES:
        x, g = images.to(dtype), gradient.to(dtype)
        expected = _by_formula(x.double(), weight.double(), g.double())
        got = kernels.output(x, weight, 1), kernels.input_gradient(g, weight, 1), kernels.weight_gradient(x, g, 1)
        for name, own, value in zip(("output", "gradient", "gradient of the weight"), got, expected, strict=True):
            off = float((own.double() - value).abs().max() / value.abs().max())
            if not off <= ALLOWED[dtype]:  # also true for NaN
                return f"{name} in {str(dtype).removeprefix('torch.')} is {off:.1g} off"
    return ""


def _by_formula(images: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute output and gradients in float64 by nine matrix products, because torch's convolution starts threads."""
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    height, width = images.shape[2:]
    output = torch.zeros_like(gradient)
    padded_gradient, weight_gradient = torch.zeros_like(padded), torch.zeros_like(weight)
    for i in range(3):
        for j in range(3):
            part = padded[:, :, i : i + height, j : j + width]
            tap = weight[:, :, i, j]
            output += torch.einsum("nchw,kc->nkhw", part, tap)
            padded_gradient[:, :, i : i + height, j : j + width] += torch.einsum("nkhw,kc->nchw", gradient, tap)
            weight_gradient[:, :, i, j] = torch.einsum("nchw,nkhw->kc", part, gradient)
    return output, padded_gradient[:, :, 1:-1, 1:-1], weight_gradient


class WinogradConv2d(nn.Conv2d):
    """A 3 x 3 convolution of stride 1 by Winograd's algorithm; inputs that the kernels do not support use torch."""

    kernels: WinogradKernels

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C', H', W'), channels-last in memory."""
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else images.dtype
        padding = cast(int, self.padding[0])
        if images.dim() != 4 or dtype not in DTYPES or min(images.shape[2:]) + 2 * padding < 3 or len(images) == 0:
            return super().forward(images)
        apply: Any = _Winograd.apply
        return cast(Tensor, apply(images.to(dtype), self.weight, self.bias, padding, self.kernels))


def covers(layer: nn.Module) -> bool:
    """Return whether the kernels support this layer."""
    if type(layer) is not nn.Conv2d or layer.padding_mode != "zeros" or layer.weight.dtype != torch.float32:
        return False
    same = layer.kernel_size == (3, 3) and layer.stride == layer.dilation == (1, 1) and layer.groups == 1
    channels = layer.in_channels % CHANNELS == layer.out_channels % CHANNELS == 0
    return same and channels and layer.padding in ((0, 0), (1, 1))


def use_winograd(network: nn.Module, kernels: WinogradKernels) -> None:
    """Convert the layers that the kernels support to WinogradConv2d; parameters and their names do not change."""
    for layer in network.modules():
        if covers(layer):
            layer.__class__ = WinogradConv2d
            cast(WinogradConv2d, layer).kernels = kernels


class _Winograd(torch.autograd.Function):
    """Autograd function of the kernels: output, input gradient and weight gradient."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, padding: int, kernels: WinogradKernels
    ) -> Tensor:
        """Return the outputs, in the dtype of the images."""
        images = images.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(images, weight)
        ctx.padding, ctx.kernels = padding, kernels
        return kernels.output(images, _dense(weight), padding, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Return the gradients of images, weight and bias, as needed."""
        images, weight = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        for_images, for_weight, for_bias = ctx.needs_input_grad[:3]
        found = ctx.kernels.input_gradient(gradient, _dense(weight), ctx.padding) if for_images else None
        own = ctx.kernels.weight_gradient(images, gradient, ctx.padding) if for_weight else None
        return found, own, gradient.float().sum((0, 2, 3)) if for_bias else None, None, None


def _dense(weight: Tensor) -> Tensor:
    return weight.contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ConvolutionShape:
    """A 3 x 3 convolution of stride 1: channels, size of the input in pixels, padding."""

    inputs: int
    outputs: int
    height: int
    width: int
    padding: int


@torch.no_grad()
def covered_shapes(network: nn.Module, example: Tensor) -> dict[str, ConvolutionShape]:
    """Return the shapes of the layers that the kernels support, by name, for an example input (N, C, H, W)."""
    found: dict[str, ConvolutionShape] = {}
    hooks = []
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Conv2d) and covers(layer):

            def record(one: nn.Conv2d, inputs: tuple[Tensor], _output: Tensor, name: str = name) -> None:
                height, width = inputs[0].shape[-2:]
                padding = cast(int, one.padding[0])
                found[name] = ConvolutionShape(
                    inputs=one.in_channels, outputs=one.out_channels, height=height, width=width, padding=padding
                )

            hooks.append(layer.register_forward_hook(record))
    training = [one for one in network.modules() if one.training]
    try:
        network.eval()(example)  # training mode would change batch-norm's statistics
    finally:
        for hook in hooks:
            hook.remove()
        for one in training:
            one.training = True
    return found


TURNS = 2
WORK = 4e9  # FLOP of a timed direct pass, about 20 ms on one core


@torch.no_grad()
def speedup(shape: ConvolutionShape, images: int, dtype: torch.dtype, kernels: WinogradKernels) -> float:
    """Measure the speedup of Winograd's algorithm over oneDNN for a layer's three passes, on this thread's cores.

    At most `images` images are used, fewer if that is enough work. The shortest times count, after a warm-up: other
    load only lengthens them.
    """
    pixels = shape.height * shape.width
    count = min(images, math.ceil(WORK / (18 * shape.inputs * shape.outputs * pixels)))
    x = torch.zeros(count, shape.inputs, shape.height, shape.width, dtype=dtype)
    x = x.to(memory_format=torch.channels_last)
    weight = torch.zeros(shape.outputs, shape.inputs, 3, 3).to(memory_format=torch.channels_last)
    own, pad = weight.to(dtype), shape.padding
    g = torch.conv2d(x, own, padding=pad)

    def direct() -> None:
        torch.conv2d(x, own, padding=pad)
        pads = [pad, pad]
        torch.ops.aten.convolution_backward(
            g, x, own, None, [1, 1], pads, [1, 1], False, [0, 0], 1, [True, True, False]
        )

    def winograd() -> None:
        kernels.output(x, weight, pad)
        kernels.input_gradient(g, weight, pad)
        kernels.weight_gradient(x, g, pad)

    def seconds(passes: Callable[[], None]) -> float:
        started = time.perf_counter()
        passes()
        return time.perf_counter() - started

    taken = [(seconds(direct), seconds(winograd)) for _ in range(TURNS + 1)][1:]  # the first round is a warm-up
    return min(one for one, _ in taken) / min(one for _, one in taken)
