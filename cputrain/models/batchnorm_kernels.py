"""The native kernels of batch-norm with residual and ReLU (native/batchnorm_relu.cpp), compiled for this CPU once."""

import ctypes
import hashlib
import platform
from collections.abc import Mapping
from ctypes import POINTER, byref, c_double, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from affinity.errors import RunError
from affinity.filesystem import cache_folder
from cputrain.native_build import NativeExtension, ensure_compiled, loading

NATIVE = Path(__file__).parent / "native"
SOURCES = tuple(
    NATIVE / name for name in ("batchnorm_relu.cpp", "backward.hpp", "forward.hpp", "rows.hpp", "values.hpp")
)
CPUINFO = Path("/proc/cpuinfo")
DTYPES = (torch.float32, torch.bfloat16)
"""Data types of images that the kernels support; parameters are float32."""


class _Images(ctypes.Structure):
    _fields_ = (("rows", c_size_t), ("channels", c_size_t), ("bfloat16", c_int), ("threads", c_int))

    @classmethod
    def of(cls, images: Tensor) -> "_Images":
        channels = images.shape[1]
        rows = images.numel() // channels
        return cls(rows, channels, images.dtype == torch.bfloat16, torch.get_num_threads())


class NormLayer(ctypes.Structure):
    """A layer's parameters, the statistics that it normalizes by (mean and variance, float64) and whether ReLU follows.

    The tensors must live as long as this.
    """

    _fields_ = (("statistics", c_void_p), ("weight", c_void_p), ("bias", c_void_p), ("eps", c_double), ("relu", c_int))

    @classmethod
    def of(cls, statistics: Tensor, weight: Tensor, bias: Tensor, eps: float, *, relu: bool) -> "NormLayer":
        """The layer of statistics (2, C) float64, weight and bias (C,) float32."""
        return cls(statistics.data_ptr(), weight.data_ptr(), bias.data_ptr(), eps, relu)


class Kernels:
    """The compiled functions. Images are (N, C, H, W), channels-last in memory, float32 or bfloat16."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with loading(path, EXTENSION.requested_by, EXTENSION.alternative):
            native = ctypes.CDLL(str(path))
        images, layer = POINTER(_Images), POINTER(NormLayer)

        def function(name: str, *arguments: Any) -> Any:
            found = getattr(native, f"batchnorm_{name}")
            found.argtypes, found.restype = arguments, None
            return found

        pointers = (c_void_p,) * 6
        self._statistics = function("statistics", images, *pointers[:2])
        self._forward = function("forward", images, layer, *pointers[:3])
        self._gradient_sums = function("gradient_sums", images, layer, *pointers)
        self._input_gradient = function("input_gradient", images, layer, *pointers[:3], c_double, c_void_p)
        sizes = (c_size_t, c_size_t, c_void_p)
        self._update_running = function("update_running", *sizes, c_void_p, c_double, *pointers[:2])
        self._parameter_gradients = function("parameter_gradients", *sizes, c_double, *pointers[:3])
        self.has_threads = bool(native.batchnorm_has_threads())
        """Whether torch's OpenMP threads can be used."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.path,)  # copies of networks share the library

    def statistics(self, images: Tensor, out: Tensor) -> None:
        """Write each channel's mean and (biased) variance to out, (2, C) float64."""
        self._statistics(byref(_Images.of(images)), images.data_ptr(), out.data_ptr())

    def update_running(
        self, statistics: Tensor, counts: list[float], momentum: float, mean: Tensor, variance: Tensor
    ) -> None:
        """Update running statistics (C,) float32 by the mean over (parts, 2, C), of `counts` values a channel each."""
        parts, _, channels = statistics.shape
        values = (c_double * parts)(*counts)
        pointers = mean.data_ptr(), variance.data_ptr()
        self._update_running(parts, channels, statistics.data_ptr(), values, momentum, *pointers)

    def forward(self, layer: NormLayer, images: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """Write the normalized images plus the residual, through ReLU where it follows, to out."""
        added = None if residual is None else residual.data_ptr()
        self._forward(byref(_Images.of(images)), byref(layer), images.data_ptr(), added, out.data_ptr())

    def gradient_sums(
        self,
        layer: NormLayer,
        gradient: Tensor,
        second: Tensor | None,
        images: Tensor,
        outputs: Tensor | None,
        before: Tensor | None,
        out: Tensor,
    ) -> None:
        """Write the sums of the gradient before ReLU, and of its product with (x - mean), to out, (2, C) float64.

        With `outputs`, write the gradient before ReLU to `before`; the one after it is then `gradient` + `second`.
        """
        at = [None if each is None else each.data_ptr() for each in (gradient, second, images, outputs, before, out)]
        self._gradient_sums(byref(_Images.of(images)), byref(layer), *at)

    def input_gradient(
        self, layer: NormLayer, gradient: Tensor, images: Tensor, sums: Tensor | None, count: float, out: Tensor
    ) -> None:
        """Write the images' gradient to out; `sums` over `count` values, None for statistics that are constants."""
        totals = None if sums is None else sums.data_ptr()
        at = gradient.data_ptr(), images.data_ptr(), totals
        self._input_gradient(byref(_Images.of(images)), byref(layer), *at, count, out.data_ptr())

    def parameter_gradients(
        self, statistics: Tensor, eps: float, sums: Tensor, weight_gradient: Tensor, bias_gradient: Tensor
    ) -> None:
        """Write the parameters' gradients (C,) float32 from statistics and sums (parts, 2, C) float64."""
        parts, _, channels = statistics.shape
        at = weight_gradient.data_ptr(), bias_gradient.data_ptr()
        self._parameter_gradients(parts, channels, statistics.data_ptr(), eps, sums.data_ptr(), *at)


def load(env: Mapping[str, str]) -> Kernels:
    """The kernels, compiled if that is not done.

    Raises InputError where there is no compiler, RunError where it fails or torch's OpenMP threads cannot be used.
    """
    kernels = _load(ensure_compiled(EXTENSION, built_path(env), env))
    if not kernels.has_threads:
        raise RunError("engine=native: torch's OpenMP runtime is not visible to other libraries: set engine=eager")
    return kernels


@cache
def _load(path: Path) -> Kernels:
    return Kernels(path)


def command_line(cxx: str, output: Path) -> tuple[str, ...]:
    """The tokens that compile the kernels."""
    return (cxx, *_options(), str(SOURCES[0]), "-o", str(output))


def _options() -> tuple[str, ...]:
    # No contraction: the backward pass repeats the forward pass's sums to the bit, in another loop. Compilers prefer
    # half of AVX-512's registers, with which bfloat16 is computed 0.8 to 0.9 times as fast.
    wide = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
    return ("-std=c++20", "-O3", "-march=native", *wide, "-ffp-contract=off", "-fPIC", "-shared")


EXTENSION = NativeExtension(
    title="the batch-norm kernels",
    requested_by="engine=native",
    alternative="set engine=eager",
    argv=command_line,
)


def built_path(env: Mapping[str, str]) -> Path:
    """Where the compiled library lies: the name depends on the sources, the command and the CPU's instructions."""
    sources = (path.read_text() for path in SOURCES)
    parts = (*sources, *_options(), platform.machine(), _cpu_flags())
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache_folder(env) / f"batchnorm-{platform.machine()}-{key}" / "batchnorm.so"


def _cpu_flags() -> str:
    lines = CPUINFO.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
