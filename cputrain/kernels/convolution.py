"""Convolutions with native kernels, and the checks of the kernels: 3 x 3 ones by Winograd's algorithm F(4x4, 3x3), and
weight gradients of others in bfloat16.

Winograd's algorithm: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016, arXiv:1509.09308),
section 4. A tile of 4 x 4 outputs takes 36 multiplications instead of 144. Sums are float32; errors are 1e-5 of the
largest value, compared to 1e-6 with the direct algorithm and 1e-3 with TF32.
"""

import copy
import ctypes
import math
import threading
import time
from collections.abc import Callable, Mapping
from ctypes import POINTER, byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from cputrain.affinity.errors import InputError
from cputrain.kernels.build import (
    KERNELS,
    KernelLibrary,
    NativeKernels,
    kernels_extension,
    library_options,
    load_kernels,
)
from cputrain.kernels.evidence import (
    DTYPES,
    VALUES,
    Native,
    are_maps,
    departure,
    is_dense,
    is_gradient_of,
    is_silent,
    is_vector,
    methods_are_plain,
    random_numbers_kept,
    runs_eagerly,
    torch_gradients,
)
from cputrain.kernels.norms import activate
from cputrain.native_build import ensure_compiled

SOURCES = tuple(
    KERNELS / name
    for name in ("winograd.cpp", "weight_gradient.cpp", "winograd.hpp", "vectors.hpp", "rows.hpp", "values.hpp")
)
CHANNELS = 16  # channels must be a multiple of this
MIN_INPUTS = 64  # input channels of a NativeWgradConv2d: fewer do not fill the registers
LARGE = 4 << 20  # bytes of transformed weights that exceed any L2 cache
LARGE_MATRIX = 1 << 20  # weights of a 1 x 1 layer that oneDNN's convolutions take longer to reorder than they save
SHAPE = (2, 16, 9, 6)  # of the check: with partial tiles at two edges
OUTPUTS = 80  # a full panel of columns and a partial one
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # error relative to the largest value, 10 and 5 times rounding
TURNS = 2
WORK = 4e9  # FLOP of a timed direct pass, about 20 ms on one core
METHODS = ("forward", "_conv_forward")
"""Methods by which torch computes a convolution."""
Pair = tuple[int, int]
_Backward = Callable[[Tensor], Tensor]


class _Layer(ctypes.Structure):
    """struct Convolution of winograd.cpp: input sizes, channels, padding, precision, threads and tiles per block."""

    _fields_ = (
        *((name, c_size_t) for name in ("images", "height", "width", "in_channels", "out_channels", "padding")),
        ("bfloat16", c_int),
        ("threads", c_int),
        ("tiles", c_size_t),
    )


class _WgradLayer(ctypes.Structure):
    """struct DirectConvolution of weight_gradient.cpp: sizes of input, output, kernel, stride, padding, and threads."""

    _fields_ = (
        *((name, c_size_t) for name in ("images", "height", "width", "in_channels", "out_channels")),
        *((name, c_size_t) for name in ("out_height", "out_width")),
        *((name, c_size_t * 2) for name in ("kernel", "stride", "padding")),
        ("threads", c_int),
    )


class ConvolutionKernels(NativeKernels):
    """The compiled functions. Images are (N, C, H, W), channels-last in memory, float32 or bfloat16; weights
    (K, C, 3, 3) are channels-last and float32. All but `direct_weight_gradient` are Winograd's algorithm.

    Each calling thread keeps scratch memory of the size of its largest layer. `multiplies_bf16` is whether the CPU has
    instructions for products of bfloat16 values, without which `direct_weight_gradient` is slow.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        layer, pointer, function = POINTER(_Layer), c_void_p, self.function
        self._scratch = function("winograd_scratch", layer, c_int, result=c_size_t)
        self._weights = function("winograd_weights", pointer, c_size_t, c_size_t, c_int, c_int, pointer)
        self._weights_size = function("winograd_weights_size", c_size_t, c_size_t, result=c_size_t)
        self._forward = function("winograd_forward", layer, *(pointer,) * 3, c_int, *(pointer,) * 2)
        self._weight_gradient = function("winograd_weight_gradient", layer, *(pointer,) * 4)
        self._direct_weight_gradient = function("weight_gradient", POINTER(_WgradLayer), *(pointer,) * 3)
        self.multiplies_bf16: bool = function("weight_gradient_native", result=c_int)() == 1
        self._buffers = threading.local()

    def transform(self, weight: Tensor, *, mirrored: bool = False, out: Tensor | None = None) -> Tensor:
        """Return transformed weights for `convolve`, 4 times as large; `mirrored` ones compute the input gradient."""
        outputs, inputs = weight.shape[:2]
        size = self._weights_size(outputs, inputs)
        transformed = torch.empty(size, **VALUES) if out is None else out
        threads = torch.get_num_threads()
        self._weights(weight.data_ptr(), outputs, inputs, mirrored, threads, transformed.data_ptr())
        return transformed

    def convolve(
        self, images: Tensor, transformed: Tensor, channels: int, padding: int, bias: Tensor | None, *, relu: bool
    ) -> Tensor:
        """(N, C, H, W) -> (N, `channels`, H', W'), plus bias (`channels`,) float32 if given, then ReLU if `relu`."""
        layer = _layer(images, channels, padding)
        count, _, height, width = images.shape
        shape = count, channels, height + 2 * padding - 2, width + 2 * padding - 2
        outputs = torch.empty(shape, dtype=images.dtype, device="cpu", memory_format=torch.channels_last)
        scratch = self._memory("scratch", self._scratch(byref(layer), 0) // 4)
        added = None if bias is None else bias.data_ptr()
        at = images.data_ptr(), transformed.data_ptr(), added
        self._forward(byref(layer), *at, relu, outputs.data_ptr(), scratch.data_ptr())
        return outputs

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
        shape = layer.out_channels, layer.in_channels, 3, 3
        result = torch.empty(shape, **VALUES, memory_format=torch.channels_last)
        scratch = self._memory("scratch", self._scratch(byref(layer), 1) // 4)
        at = images.data_ptr(), gradient.data_ptr(), result.data_ptr(), scratch.data_ptr()
        self._weight_gradient(byref(layer), *at)
        return result

    def direct_weight_gradient(
        self, images: Tensor, gradient: Tensor, weight: Tensor, stride: Pair, padding: Pair
    ) -> Tensor:
        """Return the gradient of `weight`, (K, C, R, S), in float32 and channels-last, from images and the outputs'
        gradient in bfloat16. C and K are multiples of CHANNELS."""
        count, inputs, height, width = images.shape
        sizes = count, height, width, inputs, *gradient.shape[1:]
        pairs = ((c_size_t * 2)(*pair) for pair in (weight.shape[2:], stride, padding))
        layer = _WgradLayer(*sizes, *pairs, torch.get_num_threads())
        result = torch.empty_like(weight.contiguous(memory_format=torch.channels_last), dtype=torch.float32)
        self._direct_weight_gradient(byref(layer), images.data_ptr(), gradient.data_ptr(), result.data_ptr())
        return result

    def _for_once(self, weight: Tensor, *, mirrored: bool) -> Tensor:
        """Return transformed weights in a buffer that the next call overwrites."""
        size = self._weights_size(*weight.shape[:2])
        return self.transform(weight, mirrored=mirrored, out=self._memory("weights", size))

    def _memory(self, name: str, floats: int) -> Tensor:
        """Return the calling thread's buffer, which is kept because each new page costs 0.25 us in the kernel."""
        buffer: Tensor | None = getattr(self._buffers, name, None)
        if buffer is None or buffer.numel() < floats:
            buffer = torch.empty(floats, **VALUES)
            setattr(self._buffers, name, buffer)
        return buffer


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
    compiled = (str(source) for source in SOURCES if source.suffix == ".cpp")
    return (cxx, *library_options(), "-ffp-contract=fast", *compiled, "-o", str(output))


EXTENSION = ConvolutionKernels.extension = kernels_extension("the convolution kernels", command_line)
LIBRARY = KernelLibrary(name="convolution", sources=SOURCES, extension=EXTENSION)


def load_convolutions(env: Mapping[str, str]) -> ConvolutionKernels:
    """Load the kernels, compiling them if necessary, and check them against formulas.

    Raises InputError if there is no compiler; RunError if it fails, or if a value differs by more than rounding because
    of a broken compiler or another CPU's code.
    """
    path = ensure_compiled(EXTENSION, LIBRARY.path(env), env)
    kernels: ConvolutionKernels = load_kernels(ConvolutionKernels, path)
    kernels.check(_difference(kernels))
    return kernels


@cache
def _difference(kernels: ConvolutionKernels) -> str:
    """Describe the first wrong result, "" if all are correct."""
    generator = torch.Generator().manual_seed(1)
    images, weight, gradient = (
        torch.randn(shape, generator=generator, **VALUES).to(memory_format=torch.channels_last)
        for shape in (SHAPE, (OUTPUTS, SHAPE[1], 3, 3), (SHAPE[0], OUTPUTS, *SHAPE[2:]))
    )
    for dtype in DTYPES:
        x, g = images.to(dtype), gradient.to(dtype)
        expected = _reference(x.double(), weight.double(), g.double())
        got = kernels.output(x, weight, 1), kernels.input_gradient(g, weight, 1), kernels.weight_gradient(x, g, 1)
        for name, values, exact in zip(("output", "gradient", "gradient of the weight"), got, expected, strict=True):
            if not (off := _error(values, exact)) <= ALLOWED[dtype]:  # also true for NaN
                return f"{name} in {str(dtype).removeprefix('torch.')} is {off:.1g} off"
    direct = kernels.direct_weight_gradient(x, g, weight, (1, 1), (1, 1))
    if not (off := _error(direct, expected[-1])) <= ALLOWED[torch.float32]:
        return f"direct gradient of the weight is {off:.1g} off"
    return ""


def _error(values: Tensor, expected: Tensor) -> float:
    return float((values.double() - expected).abs().max() / expected.abs().max())


def _reference(images: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute output and gradients in float64 by nine matrix products, because torch's convolution starts threads."""
    padded = functional.pad(images, (1, 1, 1, 1))
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


class WinogradConv2d(Native, nn.Conv2d):
    """A 3 x 3 convolution of stride 1 by Winograd's algorithm; calls that the kernels do not support use torch."""

    plain: ClassVar[type[nn.Module]] = nn.Conv2d
    kernels: ConvolutionKernels

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C', H', W'), channels-last in memory."""
        dtype, padding = _computed_dtype(self, input), cast(int, self.padding[0])
        if dtype is None or not _is_winograd(self) or min(input.shape[2:]) + 2 * padding < 3:
            return cast(Tensor, self.torch_fallback(input))
        apply: Any = _Winograd.apply
        return cast(Tensor, apply(input.to(dtype), self.weight, self.bias, padding, self.kernels))


def _computed_dtype(layer: "WinogradConv2d | NativeWgradConv2d", images: Tensor) -> torch.dtype | None:
    """Return the dtype in which torch computes a convolution that the kernels support, else None."""
    if not (runs_eagerly() and methods_are_plain(layer, *METHODS)):
        return None
    weight, bias = layer.weight, layer.bias
    if not (
        is_dense(images)
        and images.dim() == 4
        and images.shape[1] == layer.in_channels
        and images.numel() > 0
        and images.dtype in DTYPES
        and is_dense(weight)
        and weight.dtype == torch.float32
        and weight.shape == (layer.out_channels, layer.in_channels, *layer.kernel_size)
        and weight.is_contiguous(memory_format=torch.channels_last)
        and (bias is None or is_vector(bias, layer.out_channels))
    ):
        return None
    if not torch.is_autocast_enabled("cpu"):
        return images.dtype if images.dtype == weight.dtype else None
    dtype = torch.get_autocast_dtype("cpu")
    return dtype if dtype in DTYPES else None


def supports_winograd(layer: nn.Module) -> bool:
    """Return whether Winograd's algorithm supports this layer."""
    return _is_plain(layer) and _is_winograd(layer)


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether a layer is a convolution as built, of float32 weights."""
    plain = type(layer) is nn.Conv2d and not departure(layer)
    native = type(layer) is NativeWgradConv2d
    return isinstance(layer, nn.Conv2d) and (plain or native) and layer.weight.dtype == torch.float32


def _is_winograd(layer: nn.Conv2d) -> bool:
    square = layer.kernel_size == (3, 3) and layer.stride == (1, 1) and layer.padding in ((0, 0), (1, 1))
    return square and _has_kernels(layer)


def _has_kernels(layer: nn.Conv2d) -> bool:
    """Return whether a convolution has options for which there are kernels."""
    plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    channels = layer.in_channels % CHANNELS == layer.out_channels % CHANNELS == 0
    return plain and channels and layer.dilation == (1, 1) and layer.groups == 1


def use_winograd(network: nn.Module, kernels: ConvolutionKernels) -> None:
    """Convert the layers that the kernels support to WinogradConv2d; parameters and their names do not change."""
    _convert(network, supports_winograd, WinogradConv2d, kernels)


def _convert(
    network: nn.Module, supports: Callable[[nn.Module], bool], kind: Any, kernels: ConvolutionKernels | None = None
) -> None:
    for layer in filter(supports, network.modules()):
        layer.__class__ = kind
        if kernels is not None:
            vars(layer)["kernels"] = kernels


class _Winograd(torch.autograd.Function):
    """Autograd function of the kernels: output, input gradient and weight gradient."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, padding: int, kernels: ConvolutionKernels
    ) -> Tensor:
        """Return the outputs, in the dtype of the images."""
        images = images.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(images, weight, bias)
        ctx.padding, ctx.kernels = padding, kernels
        return kernels.output(images, weight, padding, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of images, weight and bias, as needed."""
        images, weight, _bias = ctx.saved_tensors
        of_images = partial(ctx.kernels.input_gradient, weight=weight, padding=ctx.padding)
        of_weight = partial(ctx.kernels.weight_gradient, images, padding=ctx.padding)
        return *_gradients(ctx, gradient, ((1, 1), ctx.padding), of_images, of_weight), None, None


def _gradients(
    ctx: Any, gradient: Tensor, options: tuple[Any, Any], of_images: _Backward, of_weight: _Backward
) -> tuple[Tensor | None, ...]:
    """Return the gradients of images, weight and bias, as needed, of a convolution with options (stride, padding).

    If the kernels cannot compute them, torch's operators do, so that they can be differentiated again.
    """
    images, weight, bias = ctx.saved_tensors[:3]
    needs_images, needs_weight, needs_bias = needed = ctx.needs_input_grad[:3]
    if not _has_native_backward(images, weight, gradient):

        def convolve(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
            return torch.conv2d(x, w.to(x.dtype), None if b is None else b.to(x.dtype), *options)

        return tuple(torch_gradients(convolve, (images, weight, bias), needed, gradient))
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    return (
        of_images(gradient) if needs_images else None,
        of_weight(gradient) if needs_weight else None,
        gradient.float().sum((0, 2, 3)) if needs_bias else None,
    )


def _has_native_backward(images: Tensor, weight: Tensor, gradient: Tensor) -> bool:
    """Return whether the kernels can compute the gradients, which then are not differentiated again."""
    outputs, inputs = weight.shape[:2]
    return (
        runs_eagerly()
        and not torch.is_grad_enabled()
        and are_maps(images, inputs)
        and is_dense(weight)
        and weight.dtype == torch.float32
        and weight.is_contiguous(memory_format=torch.channels_last)
        and is_gradient_of(gradient, torch.Size((len(images), outputs, *gradient.shape[2:])), images.dtype)
    )


class NativeWgradConv2d(Native, nn.Conv2d):
    """A convolution whose weight gradient in bfloat16 is computed by the kernels; all else is torch's.

    On Zen 4, those of ResNet-50's convolutions after the first take 0.9 times oneDNN's time, in the last stage 0.5 to
    0.8 times (benchmarks/weight_gradients.py). They are not rounded to bfloat16.
    """

    plain: ClassVar[type[nn.Module]] = nn.Conv2d
    kernels: ConvolutionKernels

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C', H', W')."""
        if _computed_dtype(self, input) != torch.bfloat16 or not _has_kernels(self):
            return cast(Tensor, self.torch_fallback(input))
        apply: Any = _NativeWgrad.apply
        images = input.to(torch.bfloat16)
        return cast(Tensor, apply(images, self.weight, self.bias, self.stride, self.padding, self.kernels))


def supports_native_wgrad(layer: nn.Module) -> bool:
    """Return whether the kernels compute a layer's weight gradient, and faster than oneDNN."""
    return _is_plain(layer) and _has_kernels(layer) and layer.in_channels >= MIN_INPUTS


def native_weight_gradients(network: nn.Module, kernels: ConvolutionKernels) -> None:
    """Convert the layers that the kernels support to NativeWgradConv2d; parameters and their names do not change."""
    _convert(network, supports_native_wgrad, NativeWgradConv2d, kernels)


class _NativeWgrad(torch.autograd.Function):
    """Autograd function of torch's convolution with the kernels' weight gradient."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, kernels: Any
    ) -> Tensor:
        """Return the outputs, in the dtype of the images."""
        images = images.contiguous(memory_format=torch.channels_last)
        narrow = weight.to(images.dtype)
        ctx.save_for_backward(images, weight, bias, narrow)
        ctx.options, ctx.kernels = (stride, padding), kernels
        added = None if bias is None else bias.to(images.dtype)
        if _is_matmul(narrow, padding):
            return _matmul(images[:, :, :: stride[0], :: stride[1]], narrow.flatten(1), added)
        return torch.conv2d(images, narrow, added, stride, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of images, weight and bias, as needed."""
        images, _weight, _bias, narrow = ctx.saved_tensors
        (stride, padding), kernels = ctx.options, ctx.kernels

        def of_images(gradient: Tensor) -> Tensor:
            if not _is_matmul(narrow, padding):
                options: Any = (stride, padding, (1, 1), False, (0, 0), 1, (True, False, False))
                backward = torch.ops.aten.convolution_backward
                return cast(Tensor, backward(gradient, images, narrow, None, *options)[0])
            of_pixels = _matmul(gradient, narrow.flatten(1).t())
            if stride == (1, 1):
                return of_pixels
            result = torch.zeros_like(images)
            result[:, :, :: stride[0], :: stride[1]] = of_pixels
            return result

        of_weight = partial(kernels.direct_weight_gradient, images, weight=narrow, stride=stride, padding=padding)
        return *_gradients(ctx, gradient, ctx.options, of_images, of_weight), None, None, None


def _is_matmul(weight: Tensor, padding: Pair) -> bool:
    return weight.shape[2:] == (1, 1) and padding == (0, 0) and weight.numel() >= LARGE_MATRIX


def _matmul(images: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply the channels of images (N, C, H, W) by a matrix (K, C) -> (N, K, H, W), channels-last in memory."""
    pixels = images.permute(0, 2, 3, 1)
    rows = pixels.flatten(0, 2)  # 2-D, because torch may multiply more dimensions image by image
    return functional.linear(rows, matrix, bias).view(*pixels.shape[:3], -1).permute(0, 3, 1, 2)


class PointwiseConv2d(Native, nn.Conv2d):
    """A 1 x 1 convolution whose forward and backward passes are matrix products over all pixels.

    On AMX, ResNet-50's 1 x 1 layers take 0.82 times the time of oneDNN's convolutions; in the last stage 0.4 to 0.7
    times (benchmarks/pointwise.py).
    """

    plain: ClassVar[type[nn.Module]] = nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C', H', W'), channels-last in memory; calls that have no such product use torch."""
        plain = runs_eagerly() and methods_are_plain(self, *METHODS)
        if not (plain and is_dense(input) and _is_pointwise(self)) or input.numel() == 0:
            return cast(Tensor, self.torch_fallback(input))
        autocasts = torch.is_autocast_enabled("cpu") and input.dtype in DTYPES
        maps = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
        if not maps or input.shape[1] != self.in_channels or not (autocasts or input.dtype == self.weight.dtype):
            return cast(Tensor, self.torch_fallback(input))
        down, right = self.stride
        pixels = input if down == right == 1 else input[:, :, ::down, ::right]
        weight = self.weight.permute(0, 2, 3, 1).flatten(1)  # a view, so that the gradient has the weight's strides
        return _matmul(pixels, weight, self.bias)


def supports_matmul(layer: nn.Module) -> bool:
    """Return whether a layer is a 1 x 1 convolution as built."""
    return type(layer) is nn.Conv2d and not departure(layer) and _is_pointwise(layer)


def pointwise_as_matmul(network: nn.Module) -> None:
    """Convert the 1 x 1 convolutions to PointwiseConv2d; parameters and their names do not change."""
    _convert(network, supports_matmul, PointwiseConv2d)


def _is_pointwise(layer: nn.Conv2d) -> bool:
    return layer.kernel_size == (1, 1) and layer.groups == 1 and layer.padding in ((0, 0), "valid", "same")


CONVOLUTIONS = (nn.Conv2d, NativeWgradConv2d, PointwiseConv2d, WinogradConv2d)
"""Classes of convolutions that compute the same, by different algorithms."""


def has_amx() -> bool:
    """Return whether this CPU has AMX (bfloat16 matrix registers, from Sapphire Rapids on) and the kernel permits its
    use. Kernels before Linux 5.16 do not; oneDNN then does not use it either."""
    return bool(torch.cpu._init_amx())


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ConvolutionShape:
    """A 3 x 3 convolution of stride 1: channels, size of the input in pixels, padding."""

    inputs: int
    outputs: int
    height: int
    width: int
    padding: int


def winograd_shapes(network: nn.Module, example: Any) -> dict[str, ConvolutionShape]:
    """Return the shapes of the layers that the kernels support, by name, for an example input (N, C, H, W).

    A copy of the network is evaluated, so that the network itself and the generators of random numbers do not change.
    Raises InputError if that is not possible, or would call hooks, which may keep what they see.
    """
    layers = {name for name, layer in network.named_modules() if supports_winograd(layer)}
    if not layers:
        return {}
    if not all(is_silent(module) or _is_activated(module) for module in network.modules()):
        raise InputError("hooks of the network would be called to try one example")
    shapes: dict[str, ConvolutionShape] = {}
    try:
        with random_numbers_kept(), torch.no_grad():
            tried = copy.deepcopy(network)
            for name, layer in tried.named_modules():
                if name in layers:
                    layer.register_forward_hook(partial(_record, shapes, name))
            tried.eval()(example)
    except Exception as error:  # noqa: BLE001  a user's network may raise any exception
        why = str(error).partition("\n")[0]
        raise InputError(f"a copy of the network fails with one example: {why}") from None
    return shapes


def _is_activated(module: nn.Module) -> bool:
    return list(module._forward_hooks.values()) == [activate]


def _record(shapes: dict[str, ConvolutionShape], name: str, layer: nn.Conv2d, inputs: Any, _outputs: Tensor) -> None:
    (height, width), pad = inputs[0].shape[-2:], cast(int, layer.padding[0])
    shapes[name] = ConvolutionShape(
        inputs=layer.in_channels, outputs=layer.out_channels, height=height, width=width, padding=pad
    )


@torch.no_grad()
def speedup(shape: ConvolutionShape, images: int, dtype: torch.dtype, kernels: ConvolutionKernels) -> float:
    """Measure the speedup of Winograd's algorithm over direct convolution for a layer's three passes, on this thread's
    cores.

    At most `images` images are used, fewer if that is enough work. The shortest times count, after a warm-up: other
    load only lengthens them.
    """
    pixels = shape.height * shape.width
    count = min(images, math.ceil(WORK / (18 * shape.inputs * shape.outputs * pixels)))
    x = torch.zeros(count, shape.inputs, shape.height, shape.width, dtype=dtype, device="cpu")
    x = x.to(memory_format=torch.channels_last)
    weight = torch.zeros(shape.outputs, shape.inputs, 3, 3, **VALUES).to(memory_format=torch.channels_last)
    narrow, pad = weight.to(dtype), shape.padding
    g = torch.conv2d(x, narrow, padding=pad)

    native = dtype == torch.bfloat16 and kernels.multiplies_bf16 and shape.inputs >= MIN_INPUTS  # as NativeWgradConv2d

    def direct() -> None:
        torch.conv2d(x, narrow, padding=pad)
        torch.ops.aten.convolution_backward(
            g, x, narrow, None, [1, 1], [pad, pad], [1, 1], False, [0, 0], 1, [True, not native, False]
        )
        if native:
            kernels.direct_weight_gradient(x, g, narrow, (1, 1), (pad, pad))

    def winograd() -> None:
        kernels.output(x, weight, pad)
        kernels.input_gradient(g, weight, pad)
        kernels.weight_gradient(x, g, pad)

    def seconds(passes: Callable[[], None]) -> float:
        started = time.perf_counter()
        passes()
        return time.perf_counter() - started

    rounds = [(seconds(direct), seconds(winograd)) for _ in range(TURNS + 1)][1:]  # the first round is a warm-up
    return min(slow for slow, _ in rounds) / min(fast for _, fast in rounds)
