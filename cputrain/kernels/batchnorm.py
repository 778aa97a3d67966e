"""Batch-norm fused with residual addition and ReLU by native kernels, and the check of the kernels.

State dicts are the same as BatchNorm2d's. Each call that the kernels do not support (float64, other devices, options
such as momentum=None, second derivatives, tracing) uses torch's operators.
"""

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, byref, c_double, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from cputrain.affinity.errors import RunError
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
    is_dense,
    is_gradient_of,
    is_vector,
    methods_are_plain,
    runs_eagerly,
    torch_gradients,
)
from cputrain.kernels.norms import GhostBatchNorm2d, RunningBatchNorm2d, SyncBatchNorm2d, activate, over_all_ranks
from cputrain.native_build import ensure_compiled

SOURCES = tuple(
    KERNELS / name for name in ("batchnorm_relu.cpp", "backward.hpp", "forward.hpp", "rows.hpp", "values.hpp")
)
RESIDUAL_ALIAS = "_residual_alias"  # attribute of outputs
SHAPE = (4, 35, 5, 5)  # more rows than a block summed in float32; 35 is not a multiple of any vector length
CHECKED = (
    *("output", "gradient", "gradient of the residual", "gradient of the weight", "gradient of the bias"),
    *("running mean", "running variance"),
)
NEAR_ZERO = 1e-2  # inputs of ReLU below this are not compared, as rounding may decide whether they are cut
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # error relative to the largest value, 100 and 8 times rounding


class _Images(ctypes.Structure):
    _fields_ = (("rows", c_size_t), ("channels", c_size_t), ("bfloat16", c_int), ("threads", c_int))

    @classmethod
    def of(cls, images: Tensor) -> "_Images":
        channels = images.shape[1]
        rows = images.numel() // channels
        return cls(rows, channels, images.dtype == torch.bfloat16, torch.get_num_threads())


class NormLayer(ctypes.Structure):
    """A layer's parameters, the statistics it normalizes by (mean and variance, float64), and whether ReLU follows.

    It has pointers to the tensors, which must live as long.
    """

    _fields_ = (("statistics", c_void_p), ("weight", c_void_p), ("bias", c_void_p), ("eps", c_double), ("relu", c_int))

    @classmethod
    def of(cls, statistics: Tensor, weight: Tensor, bias: Tensor, eps: float, *, relu: bool) -> "NormLayer":
        """Make the layer from statistics (2, C) float64, weight and bias (C,) float32."""
        return cls(statistics.data_ptr(), weight.data_ptr(), bias.data_ptr(), eps, relu)


class Kernels(NativeKernels):
    """The compiled functions. Images are (N, C, H, W), channels-last in memory, float32 or bfloat16."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        images, layer, function = POINTER(_Images), POINTER(NormLayer), self.function
        pointers = (c_void_p,) * 6
        self._statistics = function("batchnorm_statistics", images, *pointers[:2])
        self._forward = function("batchnorm_forward", images, layer, *pointers[:3])
        self._gradient_sums = function("batchnorm_gradient_sums", images, layer, *pointers)
        self._input_gradient = function("batchnorm_input_gradient", images, layer, *pointers[:3], c_double, c_void_p)
        sizes = (c_size_t, c_size_t, c_void_p)
        self._update_running = function("batchnorm_update_running", *sizes, c_void_p, c_double, *pointers[:2])
        self._parameter_gradients = function("batchnorm_parameter_gradients", *sizes, c_double, *pointers[:3])
        self.has_threads = bool(function("batchnorm_has_threads", result=c_int)())
        """Whether torch's OpenMP threads can be used."""

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
        """Write the normalized images plus the residual, and ReLU if the layer has it, to out."""
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

        The gradient after ReLU is `gradient`, plus `second` if given. With `outputs`, the gradient before ReLU is also
        written to `before`.
        """
        maps = (gradient, second, images, outputs, before, out)
        at = [None if tensor is None else tensor.data_ptr() for tensor in maps]
        self._gradient_sums(byref(_Images.of(images)), byref(layer), *at)

    def input_gradient(
        self, layer: NormLayer, gradient: Tensor, images: Tensor, sums: Tensor | None, count: float, out: Tensor
    ) -> None:
        """Write the images' gradient to out; `sums` are over `count` values, or None if the statistics are constant."""
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
    """Load the kernels, compiling them if necessary.

    Raises InputError if there is no compiler, RunError if it fails or torch's OpenMP threads cannot be used.
    """
    kernels: Kernels = load_kernels(Kernels, ensure_compiled(EXTENSION, LIBRARY.path(env), env))
    if not kernels.has_threads:
        raise RunError("native kernels: torch's OpenMP runtime is not visible to other libraries: use torch's layers")
    return kernels


def command_line(cxx: str, output: Path) -> tuple[str, ...]:
    """Return the compiler's command line."""
    # Without contraction to FMA, so that the backward pass recomputes the forward pass's values bit for bit.
    return (cxx, *library_options(), "-ffp-contract=off", str(SOURCES[0]), "-o", str(output))


EXTENSION = Kernels.extension = kernels_extension("the batch-norm kernels", command_line)
LIBRARY = KernelLibrary(name="batchnorm", sources=SOURCES, extension=EXTENSION)


def residual_alias(images: Tensor) -> Tensor:
    """Return an alias of a fused layer's outputs for their second use, or `images` if they are not such outputs.

    The layer's backward pass then sums both gradients while it reads them, which saves autograd's extra pass. Outputs
    that were modified, retain their gradient or have hooks are returned unchanged: hooks must see the sum.
    """
    second, version = vars(images).get(RESIDUAL_ALIAS, (images, None))  # vars(), as fx proxies have every attribute
    if version is None or version != images._version or images._backward_hooks or images.retains_grad:
        return images
    return cast(Tensor, second)


class FusedBatchNorm2d(Native, nn.BatchNorm2d):
    """BatchNorm2d, followed by the addition of a residual, if given, and ReLU, if `relu`.

    `relu` is whether the layer itself ends in ReLU; a caller that computes the ReLU after it passes relu=True.
    """

    plain: ClassVar[type[nn.Module]] = nn.BatchNorm2d
    kernels: Kernels
    relu = False
    all_ranks = False
    """Whether to normalize by the statistics over all ranks."""
    constant = False
    """Whether to normalize by the running statistics also in training."""

    def forward(
        self, input: Tensor, residual: Tensor | None = None, *, relu: bool = False, in_place: bool = False
    ) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W). `in_place`: a residual of another dtype or shape is added as by `+=`."""
        relu = relu or self.relu
        # Nothing is joined: torch's takes half to all of the time, as it makes fewer checks and saves nothing.
        alone = residual is None and not (relu or self.training or torch.is_grad_enabled())
        if alone or not self._supports(input, residual):
            return _continued(self.torch_fallback(input), residual, relu=relu, in_place=in_place)
        batch = self.training and not self.constant
        if batch and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        assert self.running_mean is not None and self.running_var is not None
        options = NormOptions(
            kernels=self.kernels,
            eps=self.eps,
            relu=relu,
            ghosts=self.ghosts(len(input)),
            all_ranks=self.all_ranks,
            running=(self.running_mean, self.running_var),
            momentum=self.momentum if batch else None,
        )
        apply: Any = _FusedBatchNorm.apply
        outputs, second = apply(input, residual, self.weight, self.bias, options)
        if second is not None and second.requires_grad:
            setattr(outputs, RESIDUAL_ALIAS, (second, outputs._version))
        return cast(Tensor, outputs)

    def undo(self) -> None:
        """Undo what was done to the layer when its class was replaced."""
        super().undo()
        if vars(self).pop("relu", False) and "act" in self._modules:
            self.register_forward_hook(activate)

    def ghosts(self, images: int) -> int:
        """Return the number of ghost batches, each normalized by its own statistics."""
        return 1

    def _supports(self, images: Tensor, residual: Tensor | None) -> bool:
        """Return whether the kernels compute what torch would, which raises an error for one value per channel."""
        if not (runs_eagerly() and methods_are_plain(self, "forward", "_check_input_dim")):
            return False
        weight = self.weight
        if weight is None or weight.dim() != 1:
            return False
        channels = len(weight)
        options = isinstance(self.eps, float) and self.eps > 0 and isinstance(self.momentum, int | float)
        return (
            options
            and self.track_running_stats is True
            and all(is_vector(value, channels) for value in (weight, self.bias, self.running_mean, self.running_var))
            and are_maps(images, channels)
            and len(images) // self.ghosts(len(images)) * images.shape[2:].numel() > 1
            and (residual is None or _are_alike(residual, images))
        )


def _are_alike(maps: Tensor, images: Tensor) -> bool:
    return are_maps(maps, images.shape[1]) and (maps.shape, maps.dtype) == (images.shape, images.dtype)


def _continued(normalized: Tensor, residual: Tensor | None, *, relu: bool, in_place: bool) -> Tensor:
    """Add the residual and apply ReLU, by torch's operators."""
    if residual is not None:
        normalized = normalized.add_(residual) if in_place else normalized + residual
    return functional.relu(normalized) if relu else normalized


class FusedGhostBatchNorm2d(FusedBatchNorm2d, GhostBatchNorm2d):
    """FusedBatchNorm2d with the statistics of ghost batches."""

    plain = GhostBatchNorm2d

    def ghosts(self, images: int) -> int:
        """Return the number of ghost batches."""
        return max(1, -(-images // self.ghost_batch)) if self.training else 1


class FusedSyncBatchNorm2d(FusedBatchNorm2d, SyncBatchNorm2d):
    """FusedBatchNorm2d with the statistics over all ranks."""

    plain = SyncBatchNorm2d
    all_ranks = True


class FusedRunningBatchNorm2d(FusedBatchNorm2d, RunningBatchNorm2d):
    """FusedBatchNorm2d with the running statistics, which are not updated."""

    plain = RunningBatchNorm2d
    constant = True


FUSED: dict[type[nn.BatchNorm2d], type[FusedBatchNorm2d]] = {
    nn.BatchNorm2d: FusedBatchNorm2d,
    GhostBatchNorm2d: FusedGhostBatchNorm2d,
    SyncBatchNorm2d: FusedSyncBatchNorm2d,
    RunningBatchNorm2d: FusedRunningBatchNorm2d,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NormOptions:
    """Options of a fused layer: epsilon, ReLU, number of ghost batches, statistics over all ranks or this rank.

    `running` are the running mean and variance, updated with `momentum`; if that is None, images are normalized by
    them.
    """

    kernels: Kernels
    eps: float
    relu: bool
    ghosts: int
    all_ranks: bool
    running: tuple[Tensor, Tensor]
    momentum: float | None


class _FusedBatchNorm(torch.autograd.Function):
    """Batch normalization (Ioffe and Szegedy 2015, arXiv:1502.03167) with residual and ReLU."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, options: NormOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs, and an alias of them if there are a residual and ReLU, else None."""
        kernels, outputs = options.kernels, torch.empty_like(images)
        counts: list[float] = []
        if options.momentum is None:
            statistics = torch.stack(options.running)[None].double()
        else:
            statistics = images.new_empty(options.ghosts, 2, images.shape[1], dtype=torch.float64)
            parts = torch.tensor_split(images, options.ghosts)
            counts = [part.numel() / part.shape[1] for part in parts]
            for part, out in zip(parts, statistics, strict=True):
                kernels.statistics(part, out)
            if options.all_ranks:
                counts = [over_all_ranks(statistics[0], counts[0])]
            # Here and not after apply: a recomputation by torch.utils.checkpoint may end while tensors are saved.
            kernels.update_running(statistics, counts, options.momentum, *options.running)
        for part, added, out, stats in zip(*_split(options.ghosts, images, residual, outputs), statistics, strict=True):
            layer = NormLayer.of(stats, weight, bias, options.eps, relu=options.relu)
            kernels.forward(layer, part, added, out)
        ctx.options, ctx.counts, ctx.has_residual = options, counts, residual is not None
        # With a residual, only the outputs show which values ReLU has cut. The next convolution saves them anyway.
        relu_outputs = outputs if options.relu and residual is not None else None
        ctx.save_for_backward(images, relu_outputs, weight, bias, statistics)
        ctx.set_materialize_grads(False)
        alias = None
        if relu_outputs is not None:  # shares memory without being a view, which would keep the outputs alive
            alias = outputs.new_empty(0)
            alias.set_(outputs.untyped_storage(), outputs.storage_offset(), outputs.shape, outputs.stride())
        return outputs, alias

    @staticmethod
    def backward(ctx: Any, *uses: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute dL/dx = scale w (g - mean(g) - xhat mean(g xhat)), g = dL/dy before ReLU; with sync, means are over
        all ranks. dL/dy is the sum over the two uses of the outputs.
        """
        images, outputs, weight, bias, statistics = ctx.saved_tensors
        gradients, channels = [gradient for gradient in uses if gradient is not None], images.shape[1]
        native = (
            runs_eagerly()
            and not torch.is_grad_enabled()
            and all(is_gradient_of(gradient, images.shape, images.dtype) for gradient in gradients)
            and are_maps(images, channels)
            and (outputs is None or _are_alike(outputs, images))
            and is_vector(weight, channels)
            and is_vector(bias, channels)
            and is_dense(statistics)
            and (statistics.dtype, statistics.shape[1:]) == (torch.float64, (2, channels))
            and statistics.is_contiguous()
        )
        if not native:
            return _torch_gradients(ctx, gradients)
        options: NormOptions = ctx.options
        kernels, ghosts, constant = options.kernels, options.ghosts, not ctx.counts
        gradients = [gradient.contiguous(memory_format=torch.channels_last) for gradient in gradients]
        gradient, second = gradients[0], gradients[1] if len(gradients) == 2 else None
        before = torch.empty_like(gradient) if outputs is not None else None
        sums = torch.empty_like(statistics)
        for part, grad, grad2, out, masked, stats, total in zip(
            *_split(ghosts, images, gradient, second, outputs, before), statistics, sums, strict=True
        ):
            layer = NormLayer.of(stats, weight, bias, options.eps, relu=options.relu)
            kernels.gradient_sums(layer, grad, grad2, part, out, masked, total)
        weight_gradient, bias_gradient = torch.empty_like(weight), torch.empty_like(bias)
        kernels.parameter_gradients(statistics, options.eps, sums, weight_gradient, bias_gradient)
        if options.all_ranks and not constant:
            dist.all_reduce(sums)
        input_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient = torch.empty_like(images)
            of_outputs, relu = (gradient, options.relu) if before is None else (before, False)
            for i, (part, grad, out, stats, total) in enumerate(
                zip(*_split(ghosts, images, of_outputs, input_gradient), statistics, sums, strict=True)
            ):
                layer = NormLayer.of(stats, weight, bias, options.eps, relu=relu)
                count = 1.0 if constant else ctx.counts[i]
                kernels.input_gradient(layer, grad, part, None if constant else total, count, out)
        residual_gradient = (before if before is not None else gradient) if ctx.has_residual else None
        return input_gradient, residual_gradient, weight_gradient, bias_gradient, None


def _torch_gradients(ctx: Any, gradients: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the same gradients by torch's operators, which can be differentiated again."""
    images, outputs, weight, bias, statistics = ctx.saved_tensors
    options: NormOptions = ctx.options
    batch = bool(ctx.counts)
    if options.all_ranks and batch:
        raise RunError("batch-norm over all ranks has first derivatives only: set model.bn_stats=local")
    mean, variance = (None, None) if batch else statistics[0].to(weight.dtype).unbind()

    def normalized(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        parts = torch.tensor_split(x, options.ghosts)
        ghosts = [functional.batch_norm(part, mean, variance, w, b, training=batch, eps=options.eps) for part in parts]
        y = torch.cat(ghosts) if len(ghosts) > 1 else ghosts[0]
        return y.relu() if options.relu and outputs is None else y

    gradient = gradients[0] if len(gradients) == 1 else gradients[0] + gradients[1]
    if outputs is not None:
        gradient = gradient.masked_fill(outputs <= 0, 0)  # as torch's ReLU, also where values are not finite
    needed = (ctx.needs_input_grad[0], *ctx.needs_input_grad[2:4])
    for_images, *for_parameters = torch_gradients(normalized, (images, weight, bias), needed, gradient)
    return for_images, gradient if ctx.has_residual else None, *for_parameters, None


def _split(parts: int, *tensors: Tensor | None) -> list[tuple[Tensor | None, ...]]:
    """Split each tensor along its images into `parts`; None remains None."""
    if parts == 1:
        return [(tensor,) for tensor in tensors]
    return [(None,) * parts if tensor is None else torch.tensor_split(tensor, parts) for tensor in tensors]


def verify_kernels(kernels: Kernels) -> Kernels:
    """Check the kernels against formulas, once in a process, and return them.

    Raises RunError if a value differs by more than rounding, because of a broken compiler or another CPU's code.
    """
    kernels.check(_difference(kernels))
    return kernels


@cache
def _difference(kernels: Kernels) -> str:
    """Describe the first wrong result, "" if all are correct."""
    generator = torch.Generator().manual_seed(1)
    weight, bias = (torch.randn(SHAPE[1], generator=generator, **VALUES) for _ in range(2))
    maps = [torch.randn(SHAPE, generator=generator, **VALUES).to(memory_format=torch.channels_last) for _ in range(3)]
    with torch.inference_mode(False), torch.enable_grad():
        for dtype in DTYPES:
            images, added, gradient = (tensor.to(dtype) for tensor in maps)
            for residual in (None, added):
                layer = FusedBatchNorm2d(SHAPE[1], **VALUES)
                layer.kernels, layer.relu = kernels, True
                layer.load_state_dict({**layer.state_dict(), "weight": weight, "bias": bias})
                expected, compared = _reference(layer, images, residual, gradient)
                got = _native(layer, images, residual, gradient * compared)
                for name, value in expected.items():
                    off = float((got[name].double() - value.view_as(got[name])).abs().max() / value.abs().max())
                    if not off <= ALLOWED[dtype]:  # also true for NaN
                        return f"{name} in {str(dtype).removeprefix('torch.')} is {off:.1g} off"
    return ""


def _reference(
    layer: FusedBatchNorm2d, images: Tensor, residual: Tensor | None, gradient: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Compute output, gradients and running statistics of a new layer in float64; also return the mask of values whose
    gradient was used. It uses elementary operators because torch's batch_norm starts threads.
    """
    assert layer.momentum is not None
    x, weight, bias = (value.detach().double().requires_grad_() for value in (images, layer.weight, layer.bias))
    added = torch.zeros_like(x) if residual is None else residual.double()
    added.requires_grad_()
    mean = x.mean((0, 2, 3), keepdim=True)
    variance = (x - mean).square().mean((0, 2, 3), keepdim=True)
    before = (x - mean) / (variance + layer.eps).sqrt() * weight.view(-1, 1, 1) + bias.view(-1, 1, 1) + added
    outputs, compared = before.relu(), before.detach().abs() > NEAR_ZERO
    outputs.backward(gradient.double() * compared)  # type: ignore[no-untyped-call]
    count = images.numel() / images.shape[1]
    running_mean = layer.momentum * mean.detach()
    running_var = 1 - layer.momentum + layer.momentum * count / (count - 1) * variance.detach()
    of_residual = None if residual is None else added.grad
    values = _by_name(outputs.detach(), x.grad, of_residual, weight.grad, bias.grad, running_mean, running_var)
    return values, compared


def _by_name(*values: Tensor | None) -> dict[str, Tensor]:
    return {name: value for name, value in zip(CHECKED, values, strict=True) if value is not None}


def _native(layer: FusedBatchNorm2d, images: Tensor, residual: Tensor | None, gradient: Tensor) -> dict[str, Tensor]:
    """Compute the same values with the layer."""
    x, added = images.clone().requires_grad_(), None if residual is None else residual.clone().requires_grad_()
    outputs = layer(x, added)
    uses = [outputs] if added is None else [outputs, residual_alias(outputs)]
    torch.autograd.backward(uses, [gradient / len(uses)] * len(uses))
    of_residual = None if added is None else added.grad
    gradients = x.grad, of_residual, layer.weight.grad, layer.bias.grad
    return _by_name(outputs.detach(), *gradients, layer.running_mean, layer.running_var)
