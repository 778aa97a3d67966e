"""Batch-norm fused with residual addition and activation by native kernels.

State dicts are the same as BatchNorm2d's. Each call that the kernels do not support (float64, other devices, options
such as momentum=None, second derivatives, tracing) uses torch's operators.
"""

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, byref, c_double, c_float, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from cputrain.affinity.errors import RunError
from cputrain.kernels.activations import RELU, Activation
from cputrain.kernels.build import (
    KERNELS,
    KernelLibrary,
    NativeKernels,
    kernels_extension,
    library_options,
    load_kernels,
)
from cputrain.kernels.evidence import (
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
    KERNELS / name
    for name in ("batchnorm_relu.cpp", "backward.hpp", "forward.hpp", "activations.hpp", "rows.hpp", "values.hpp")
)
RESIDUAL_ALIAS = "_residual_alias"  # attribute of outputs


class _Images(ctypes.Structure):
    _fields_ = (
        *((name, c_size_t) for name in ("images", "pixels", "channels", "parts")),
        ("bfloat16", c_int),
        ("threads", c_int),
    )

    @classmethod
    def of(cls, images: Tensor, parts: int) -> "_Images":
        count, channels, height, width = images.shape
        return cls(count, height * width, channels, parts, images.dtype == torch.bfloat16, torch.get_num_threads())


class NormLayer(ctypes.Structure):
    """A layer's parameters, the statistics it normalizes by (mean and variance, float64) and the activation that
    follows.

    It has pointers to the tensors, which must live as long.
    """

    _fields_ = (
        *((name, c_void_p) for name in ("statistics", "weight", "bias")),
        ("eps", c_double),
        ("activation", c_int),
        ("slope", c_float),
    )

    @classmethod
    def of(
        cls, statistics: Tensor, weight: Tensor, bias: Tensor, eps: float, activation: Activation | None
    ) -> "NormLayer":
        """Make the layer from statistics (parts, 2, C) float64, weight and bias (C,) float32."""
        number, slope = (0, 0.0) if activation is None else (activation.number, activation.slope)
        return cls(statistics.data_ptr(), weight.data_ptr(), bias.data_ptr(), eps, number, slope)


class Kernels(NativeKernels):
    """The compiled functions. Images are (N, C, H, W), channels-last in memory, float32 or bfloat16, in `parts` ghost
    batches that torch.tensor_split would make; statistics and sums are (parts, 2, C) float64."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        images, layer, function = POINTER(_Images), POINTER(NormLayer), self.function
        pointers = (c_void_p,) * 6
        self._statistics = function("batchnorm_statistics", images, *pointers[:2])
        self._forward = function("batchnorm_forward", images, layer, *pointers[:4])
        self._gradient_sums = function("batchnorm_gradient_sums", images, layer, *pointers)
        self._input_gradient = function("batchnorm_input_gradient", images, layer, *pointers[:3], c_double, c_void_p)
        running = (c_void_p, c_double, c_double, *pointers[:2])
        self._update_running = function("batchnorm_update_running", images, *running)
        self._parameter_gradients = function("batchnorm_parameter_gradients", images, layer, *pointers[:3])
        self.has_threads = bool(function("batchnorm_has_threads", result=c_int)())
        """Whether torch's OpenMP threads can be used."""

    def statistics(self, images: Tensor, parts: int) -> Tensor:
        """Return the mean and (biased) variance of each channel in each part."""
        out = torch.empty((parts, 2, images.shape[1]), dtype=torch.float64, device="cpu")
        self._statistics(byref(_Images.of(images, parts)), images.data_ptr(), out.data_ptr())
        return out

    def update_running(
        self, images: Tensor, statistics: Tensor, count: float, momentum: float, mean: Tensor, variance: Tensor
    ) -> None:
        """Update running statistics (C,) float32 by the mean over the parts, of `count` values a channel each, or those
        of the images if it is 0."""
        pointers = mean.data_ptr(), variance.data_ptr()
        sizes = byref(_Images.of(images, len(statistics)))
        self._update_running(sizes, statistics.data_ptr(), count, momentum, *pointers)

    def forward(
        self, layer: NormLayer, parts: int, images: Tensor, residual: Tensor | None, before: Tensor | None, out: Tensor
    ) -> None:
        """Write the activation of the normalized images plus the residual to out, and its input to `before`."""
        maps = (images, residual, before, out)
        self._forward(byref(_Images.of(images, parts)), byref(layer), *map(_address, maps))

    def gradient_sums(
        self,
        layer: NormLayer,
        gradient: Tensor,
        second: Tensor | None,
        images: Tensor,
        after: Tensor | None,
        before: Tensor | None,
        out: Tensor,
    ) -> None:
        """Write the sums of the gradient before the activation, and of its product with (x - mean), to out.

        The gradient after the activation is `gradient`, plus `second` if given. With `after`, a map that shows the
        activation's derivative, or if the activation is costly, the gradient before it is also written to `before`.
        """
        maps = (gradient, second, images, after, before, out)
        self._gradient_sums(byref(_Images.of(images, len(out))), byref(layer), *map(_address, maps))

    def input_gradient(
        self, layer: NormLayer, parts: int, gradient: Tensor, images: Tensor, sums: Tensor | None, count: float
    ) -> Tensor:
        """Return the images' gradient; `sums` are over `count` values, those of the images if it is 0, and None if the
        statistics are constant."""
        out = torch.empty_like(images)
        sizes, at = byref(_Images.of(images, parts)), map(_address, (gradient, images, sums))
        self._input_gradient(sizes, byref(layer), *at, count, out.data_ptr())
        return out

    def parameter_gradients(
        self, layer: NormLayer, images: Tensor, sums: Tensor, weight_gradient: Tensor, bias_gradient: Tensor
    ) -> None:
        """Write the parameters' gradients (C,) float32 from the layer's statistics and the sums."""
        at = map(_address, (sums, weight_gradient, bias_gradient))
        self._parameter_gradients(byref(_Images.of(images, len(sums))), byref(layer), *at)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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
    # Comparisons raise no traps that one asks for, so that their loops need no masks.
    options = ("-ffp-contract=off", "-fno-trapping-math")
    return (cxx, *library_options(), *options, str(SOURCES[0]), "-o", str(output))


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
    """BatchNorm2d, followed by the addition of a residual, if given, and an activation.

    `activation` is that in which the layer itself ends; a caller that computes one after it passes its name, with
    LeakyReLU's slope for negative values.
    """

    plain: ClassVar[type[nn.Module]] = nn.BatchNorm2d
    kernels: Kernels
    activation: Activation | None = None
    all_ranks = False
    """Whether to normalize by the statistics over all ranks."""
    constant = False
    """Whether to normalize by the running statistics also in training."""

    def forward(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        *,
        activation: str = "",
        slope: float = 0.0,
        in_place: bool = False,
    ) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W). `in_place`: a residual of another dtype or shape is added as by `+=`."""
        after = Activation(activation, slope) if activation else self.activation
        # Nothing is joined: torch's takes half to all of the time, as it makes fewer checks and saves nothing.
        alone = residual is None and after is None and not (self.training or torch.is_grad_enabled())
        if alone or not self._supports(input, residual):
            return _continued(self.torch_fallback(input), residual, after, in_place=in_place)
        batch = self.training and not self.constant
        if batch and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        assert self.running_mean is not None and self.running_var is not None
        options = NormOptions(
            kernels=self.kernels,
            eps=self.eps,
            activation=after,
            ghosts=self.ghosts(len(input)),
            all_ranks=self.all_ranks,
            running=(self.running_mean, self.running_var),
            momentum=self.momentum if batch else None,
        )
        apply: Any = _FusedBatchNorm.apply
        outputs, second, _ = apply(input, residual, self.weight, self.bias, options)
        if second is not None and second.requires_grad:
            setattr(outputs, RESIDUAL_ALIAS, (second, outputs._version))
        return cast(Tensor, outputs)

    def undo(self) -> None:
        """Undo what was done to the layer when its class was replaced."""
        super().undo()
        if vars(self).pop("activation", None) and "act" in self._modules:
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


def _continued(normalized: Tensor, residual: Tensor | None, activation: Activation | None, *, in_place: bool) -> Tensor:
    """Add the residual and apply the activation, by torch's operators."""
    if residual is not None:
        normalized = normalized.add_(residual) if in_place else normalized + residual
    return normalized if activation is None else activation(normalized)


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
    """Options of a fused layer: epsilon, activation, number of ghost batches, statistics over all ranks or this rank.

    `running` are the running mean and variance, updated with `momentum`; if that is None, images are normalized by
    them.
    """

    kernels: Kernels
    eps: float
    activation: Activation | None
    ghosts: int
    all_ranks: bool
    running: tuple[Tensor, Tensor]
    momentum: float | None


class _FusedBatchNorm(torch.autograd.Function):
    """Batch normalization (Ioffe and Szegedy 2015, arXiv:1502.03167) with residual and activation."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, options: NormOptions
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the outputs; an alias of them if there are a residual and ReLU; and the activation's input if it is
        kept, so that second derivatives reach it.
        """
        kernels, activation, outputs = options.kernels, options.activation, torch.empty_like(images)
        count = 0.0  # of the images
        if options.momentum is None:
            statistics = torch.stack(options.running)[None].double()
        else:
            statistics = kernels.statistics(images, options.ghosts)
            if options.all_ranks:
                count = over_all_ranks(statistics[0], images.numel() / images.shape[1])
            # Here and not after apply: a recomputation by torch.utils.checkpoint may end while tensors are saved.
            kernels.update_running(images, statistics, count, options.momentum, *options.running)
        # With a residual, the images do not tell the activation's derivative: its outputs do, which the next
        # convolution saves anyway, or its input.
        after = None
        if activation is not None and residual is not None:
            after = outputs if activation.keeps_output else torch.empty_like(images)
        layer = NormLayer.of(statistics, weight, bias, options.eps, activation)
        kernels.forward(layer, options.ghosts, images, residual, None if after is outputs else after, outputs)
        ctx.options, ctx.count, ctx.has_residual = options, count, residual is not None
        ctx.save_for_backward(images, after, weight, bias, statistics)
        ctx.set_materialize_grads(False)
        alias = None
        if after is not None and activation == RELU:  # shares memory without being a view, which would keep the outputs
            alias = outputs.new_empty(0)
            alias.set_(outputs.untyped_storage(), outputs.storage_offset(), outputs.shape, outputs.stride())
        return outputs, alias, None if after is outputs else after

    @staticmethod
    def backward(ctx: Any, *uses: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute dL/dx = scale w (g - mean(g) - xhat mean(g xhat)), g = dL/dy before the activation; with sync, means
        are over all ranks. dL/dy is the sum over the two uses of the outputs.
        """
        images, after, weight, bias, statistics = ctx.saved_tensors
        *of_outputs, of_input = uses
        gradients, channels = [gradient for gradient in of_outputs if gradient is not None], images.shape[1]
        native = (
            of_input is None
            and runs_eagerly()
            and not torch.is_grad_enabled()
            and all(is_gradient_of(gradient, images.shape, images.dtype) for gradient in gradients)
            and are_maps(images, channels)
            and (after is None or _are_alike(after, images))
            and is_vector(weight, channels)
            and is_vector(bias, channels)
            and is_dense(statistics)
            and (statistics.dtype, statistics.shape[1:]) == (torch.float64, (2, channels))
            and statistics.is_contiguous()
        )
        if not native:
            return _torch_gradients(ctx, gradients, of_input)
        options: NormOptions = ctx.options
        kernels, constant = options.kernels, options.momentum is None
        gradients = [gradient.contiguous(memory_format=torch.channels_last) for gradient in gradients]
        gradient, second = gradients[0], gradients[1] if len(gradients) == 2 else None
        costly = options.activation is not None and options.activation.costly
        before = torch.empty_like(gradient) if costly or after is not None else None
        layer = NormLayer.of(statistics, weight, bias, options.eps, options.activation)
        sums = torch.empty_like(statistics)
        kernels.gradient_sums(layer, gradient, second, images, after, before, sums)
        weight_gradient, bias_gradient = torch.empty_like(weight), torch.empty_like(bias)
        kernels.parameter_gradients(layer, images, sums, weight_gradient, bias_gradient)
        if options.all_ranks and not constant:
            dist.all_reduce(sums)
        input_gradient = None
        if before is not None:
            gradient, layer.activation = before, 0
        if ctx.needs_input_grad[0]:
            means = None if constant else sums
            input_gradient = kernels.input_gradient(layer, options.ghosts, gradient, images, means, ctx.count)
        return input_gradient, gradient if ctx.has_residual else None, weight_gradient, bias_gradient, None


def _torch_gradients(ctx: Any, gradients: list[Tensor], of_input: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the same gradients by torch's operators, which can be differentiated again; `of_input` is that of the
    activation's input, if something has used it."""
    images, after, weight, bias, statistics = ctx.saved_tensors
    options: NormOptions = ctx.options
    batch, activation = options.momentum is not None, options.activation
    if options.all_ranks and batch:
        raise RunError("batch-norm over all ranks has first derivatives only: set model.bn_stats=local")
    mean, variance = (None, None) if batch else statistics[0].to(weight.dtype).unbind()

    def normalized(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        parts = torch.tensor_split(x, options.ghosts)
        ghosts = [functional.batch_norm(part, mean, variance, w, b, training=batch, eps=options.eps) for part in parts]
        y = torch.cat(ghosts) if len(ghosts) > 1 else ghosts[0]
        return y if activation is None or after is not None else activation(y)

    gradient: Any = sum(gradients) if gradients else None
    if gradient is not None and after is not None and activation is not None:
        (gradient,) = torch_gradients(activation, (after,), (True,), gradient)
    gradient = sum(value for value in (gradient, of_input) if value is not None)
    needed = (ctx.needs_input_grad[0], *ctx.needs_input_grad[2:4])
    for_images, *for_parameters = torch_gradients(normalized, (images, weight, bias), needed, gradient)
    return for_images, gradient if ctx.has_residual else None, *for_parameters, None
