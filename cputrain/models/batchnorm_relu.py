"""Batch-norm with the addition of a residual and ReLU in one layer, by native kernels, with every kind of statistics.

State dicts are BatchNorm2d's. What the kernels do not support (float64, other devices) goes through torch's operators.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cputrain.models.batchnorm import GhostBatchNorm2d, RunningBatchNorm2d, SyncBatchNorm2d
from cputrain.models.batchnorm_kernels import DTYPES, Kernels, NormLayer

SECOND_USE = "_second_use"


def second_use(images: Tensor) -> Tensor:
    """The outputs of a fused layer with a residual, for a second use of them; other and changed tensors as they are.

    The layer's backward pass then adds up the two gradients while it reads them: autograd takes a pass of its own. So
    do outputs whose gradient is kept or has hooks, which are for the sum.
    """
    second, version = vars(images).get(SECOND_USE, (images, None))  # a tracer's stand-in has every attribute
    if version is None or version != images._version or images._backward_hooks or images.retains_grad:
        return images
    return cast(Tensor, second)


class FusedBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d, then the addition of a residual if there is one, then ReLU if `relu`."""

    kernels: Kernels
    relu = False
    all_ranks = False
    """Whether statistics are those of all ranks."""
    constant = False
    """Whether statistics are the running ones in training too."""

    def forward(self, images: Tensor, residual: Tensor | None = None) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W), channels-last in memory; a residual has the same shape."""
        if not self._supports(images):
            return self._by_torch(super().forward(images), residual)
        images = images.contiguous(memory_format=torch.channels_last)
        if residual is not None:
            residual = residual.to(images.dtype).contiguous(memory_format=torch.channels_last)
        batch = self.training and not self.constant
        options = NormOptions(
            kernels=self.kernels,
            eps=self.eps,
            relu=self.relu,
            ghosts=self.ghosts(len(images)),
            all_ranks=self.all_ranks,
        )
        apply: Any = _FusedBatchNorm.apply
        fixed = None if batch else (self.running_mean, self.running_var)
        outputs, second, statistics, counts = apply(images, residual, self.weight, self.bias, fixed, options)
        if batch:
            self._update_running(statistics, counts)
        if second is not None and second.requires_grad:
            setattr(outputs, SECOND_USE, (second, outputs._version))
        return cast(Tensor, outputs)

    def ghosts(self, images: int) -> int:
        """The number of parts of a batch that are normalized each by its own statistics."""
        return 1

    def _supports(self, images: Tensor) -> bool:
        """Whether the kernels can do this; with one value a channel, torch raises an error."""
        return images.dtype in DTYPES and self.weight.dtype == torch.float32 and images.numel() > images.shape[1]

    def _by_torch(self, normalized: Tensor, residual: Tensor | None) -> Tensor:
        total = normalized if residual is None else normalized + residual
        return functional.relu(total) if self.relu else total

    def _update_running(self, statistics: Tensor, counts: list[float]) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        running = self.running_mean, self.running_var
        self.kernels.update_running(statistics, counts, self.momentum, *running)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)


class FusedGhostBatchNorm2d(FusedBatchNorm2d, GhostBatchNorm2d):
    """FusedBatchNorm2d by the statistics of ghost batches."""

    def ghosts(self, images: int) -> int:
        """The number of ghost batches."""
        return max(1, -(-images // self.ghost_batch)) if self.training else 1


class FusedSyncBatchNorm2d(FusedBatchNorm2d, SyncBatchNorm2d):
    """FusedBatchNorm2d by the statistics over all ranks."""

    all_ranks = True


class FusedRunningBatchNorm2d(FusedBatchNorm2d, RunningBatchNorm2d):
    """FusedBatchNorm2d by the running statistics, which stay as they are."""

    constant = True


FUSED: dict[type[nn.BatchNorm2d], type[FusedBatchNorm2d]] = {
    nn.BatchNorm2d: FusedBatchNorm2d,
    GhostBatchNorm2d: FusedGhostBatchNorm2d,
    SyncBatchNorm2d: FusedSyncBatchNorm2d,
    RunningBatchNorm2d: FusedRunningBatchNorm2d,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NormOptions:
    """How a layer normalizes: in so many ghost batches, by its own statistics or those of all ranks."""

    kernels: Kernels
    eps: float
    relu: bool
    ghosts: int
    all_ranks: bool


class _FusedBatchNorm(torch.autograd.Function):
    """Batch normalization (Ioffe and Szegedy 2015, arXiv:1502.03167), residual and ReLU."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        fixed: tuple[Tensor, Tensor] | None,
        options: NormOptions,
    ) -> tuple[Tensor, Tensor | None, Tensor, list[float]]:
        """The outputs, twice where there are a residual and ReLU; mean and variance (ghosts, 2, C) in float64, and of
        how many values a channel each.

        `fixed` are the mean and variance to normalize by, None for the batch's own.
        """
        kernels, outputs = options.kernels, torch.empty_like(images)
        counts: list[float] = []
        if fixed is not None:
            statistics = torch.stack(fixed)[None].double()
        else:
            statistics = images.new_empty(options.ghosts, 2, images.shape[1], dtype=torch.float64)
            parts = torch.tensor_split(images, options.ghosts)
            counts = [part.numel() / part.shape[1] for part in parts]
            for part, own in zip(parts, statistics, strict=True):
                kernels.statistics(part, own)
            if options.all_ranks:
                counts = [_over_all_ranks(statistics[0], counts[0])]
        for part, added, out, own in zip(*_split(options.ghosts, images, residual, outputs), statistics, strict=True):
            layer = NormLayer.of(own, weight, bias, options.eps, relu=options.relu)
            kernels.forward(layer, part, added, out)
        ctx.options, ctx.counts, ctx.has_residual = options, counts, residual is not None
        # With a residual, only the outputs tell which values ReLU has cut. The next convolution keeps them anyway.
        kept = outputs if options.relu and residual is not None else None
        ctx.save_for_backward(images, kept, weight, bias, statistics)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        second = None
        if kept is not None:  # the same memory, and no view: that would hold the outputs
            second = outputs.new_empty(0)
            second.set_(outputs.untyped_storage(), outputs.storage_offset(), outputs.shape, outputs.stride())
        return outputs, second, statistics, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *used: Tensor | None) -> tuple[Tensor | None, ...]:
        """dL/dx = scale w (g - mean(g) - xhat mean(g xhat)), g = dL/dy before ReLU; means over all ranks with sync.

        dL/dy is the sum over the two uses of the outputs.
        """
        images, outputs, weight, bias, statistics = ctx.saved_tensors
        options: NormOptions = ctx.options
        kernels, ghosts, constant = options.kernels, options.ghosts, not ctx.counts
        gradients = [each.contiguous(memory_format=torch.channels_last) for each in used if each is not None]
        gradient, second = gradients[0], gradients[1] if len(gradients) == 2 else None
        before = torch.empty_like(gradient) if outputs is not None else None
        sums = torch.empty_like(statistics)
        for part, given, other, out, left, own, total in zip(
            *_split(ghosts, images, gradient, second, outputs, before), statistics, sums, strict=True
        ):
            layer = NormLayer.of(own, weight, bias, options.eps, relu=options.relu)
            kernels.gradient_sums(layer, given, other, part, out, left, total)
        weight_gradient, bias_gradient = torch.empty_like(weight), torch.empty_like(bias)
        kernels.parameter_gradients(statistics, options.eps, sums, weight_gradient, bias_gradient)
        if options.all_ranks and not constant:
            dist.all_reduce(sums)
        input_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient = torch.empty_like(images)
            masked, relu = (gradient, options.relu) if before is None else (before, False)
            for i, (part, given, out, own, total) in enumerate(
                zip(*_split(ghosts, images, masked, input_gradient), statistics, sums, strict=True)
            ):
                layer = NormLayer.of(own, weight, bias, options.eps, relu=relu)
                count = 1.0 if constant else ctx.counts[i]
                kernels.input_gradient(layer, given, part, None if constant else total, count, out)
        left_over = (before if before is not None else gradient) if ctx.has_residual else None
        return input_gradient, left_over, weight_gradient, bias_gradient, None, None


def _split(parts: int, *tensors: Tensor | None) -> list[tuple[Tensor | None, ...]]:
    """Each tensor in so many parts of its images; None stays None."""
    if parts == 1:
        return [(each,) for each in tensors]
    return [torch.tensor_split(each, parts) if each is not None else (None,) * parts for each in tensors]


def _over_all_ranks(statistics: Tensor, count: float) -> float:
    """Replace mean and variance (2, C) of this rank's `count` values by those of all ranks; return their number."""
    mean, variance = statistics
    packed = torch.cat([count * mean, count * (variance + mean.square()), mean.new_tensor([count])])
    dist.all_reduce(packed)
    total = float(packed[-1])
    mean_of_all, square = packed[:-1].view(2, -1) / total
    statistics[0] = mean_of_all
    statistics[1] = (square - mean_of_all.square()).clamp_(min=0)
    return total
