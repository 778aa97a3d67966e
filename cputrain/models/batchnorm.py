"""Batch-norm with other statistics than those of a rank's local batch. State dicts are the same as BatchNorm2d's."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


class GhostBatchNorm2d(nn.BatchNorm2d):
    """In training, splits the batch into ghost batches of at most `ghost_batch` images, each normalized by itself.

    The running statistics take the mean over the ghost batches (Hoffer et al. 2017, arXiv:1705.08741).
    """

    ghost_batch: int

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        if not self.training or len(images) <= self.ghost_batch:
            return super().forward(images)
        ghosts = torch.tensor_split(images, -(-len(images) // self.ghost_batch))
        statistics = images.new_zeros(len(ghosts), 2, self.num_features)
        normalized = [
            # with momentum 1 the buffers take the ghost batch's own statistics
            functional.batch_norm(
                ghost, own[0], own[1], self.weight, self.bias, training=True, momentum=1.0, eps=self.eps
            )
            for ghost, own in zip(ghosts, statistics, strict=True)
        ]
        update_running_stats(self, *statistics.mean(0))
        return torch.cat(normalized)


class SyncBatchNorm2d(nn.BatchNorm2d):
    """In training, normalizes by the statistics over all ranks; torch's SyncBatchNorm does not run on CPUs."""

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W). N may differ between ranks."""
        if not self.training:
            return super().forward(images)
        apply: Any = _Normalize.apply
        normalized, mean, variance, count = apply(images, self.weight, self.bias, self.eps)
        update_running_stats(self, mean, variance * count / (count - 1))
        return cast(Tensor, normalized)


class RunningBatchNorm2d(nn.BatchNorm2d):
    """Normalizes by the running statistics in training too, and does not update them."""

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        return functional.batch_norm(
            images, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


@torch.no_grad()
def update_running_stats(layer: nn.BatchNorm2d, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics with a step's mean and (unbiased) variance, as BatchNorm2d does."""
    assert layer.running_mean is not None and layer.running_var is not None and layer.momentum is not None
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), layer.momentum)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), layer.momentum)
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)


class _Normalize(torch.autograd.Function):
    """Batch normalization (Ioffe and Szegedy 2015, arXiv:1502.03167) over all ranks, two all-reduces a layer."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
        own = images.numel() // images.shape[1]
        # in float64: the mean of squares minus the square of the mean is a small difference of large numbers
        own_variance, own_mean = (each.double() for each in torch.var_mean(images, (0, 2, 3), correction=0))
        packed = torch.cat([own * own_mean, own * (own_variance + own_mean.square()), own_mean.new_tensor([own])])
        dist.all_reduce(packed)
        count = packed[-1]
        mean, square = packed[:-1].view(2, -1) / count
        variance = (square - mean.square()).clamp_(min=0)
        scale = (variance + eps).rsqrt()
        narrow = [value.to(weight.dtype) for value in (mean, scale)]
        ctx.save_for_backward(images, weight, *narrow, count)
        normalized = functional.batch_norm(
            images, narrow[0], variance.to(weight.dtype), weight, bias, training=False, eps=eps
        )
        ctx.mark_non_differentiable(mean, variance, count)
        return normalized, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """dL/dx = scale w (g - mean(g) - xhat mean(g xhat)) for the loss L and g = dL/dy, means over all ranks."""
        images, weight, mean, scale, count = ctx.saved_tensors
        gradient = gradients[0]

        def by_channel(values: Tensor) -> Tensor:
            return values.view(1, -1, 1, 1)

        centered = images - by_channel(mean)
        own_bias, own_weight = gradient.sum((0, 2, 3)), (gradient * centered).sum((0, 2, 3)) * scale
        sums = torch.cat([own_bias, own_weight])
        dist.all_reduce(sums)
        mean_g, mean_gx = (sums / count.to(sums.dtype)).view(2, -1)
        input_gradient = gradient - by_channel(mean_g) - centered * by_channel(scale * mean_gx)
        return input_gradient * by_channel(scale * weight), own_weight, own_bias, None
