"""Batch-norm layers by torch's operators: over ghost batches, over all ranks, by running statistics."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


def batchnorms(model: nn.Module) -> list[nn.BatchNorm2d]:
    """Return the batch-norm layers, in the model's order."""
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


class GhostBatchNorm2d(nn.BatchNorm2d):
    """Batch-norm over ghost batches (Hoffer et al. 2017, arXiv:1705.08741): in training, the batch is split into parts
    of at most `ghost_batch` images, each normalized separately.

    The running statistics are updated with the mean over the ghost batches.
    """

    ghost_batch: int

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        if not self.training or len(input) <= self.ghost_batch:
            return super().forward(input)
        ghosts = torch.tensor_split(input, -(-len(input) // self.ghost_batch))
        assert self.running_mean is not None
        statistics = self.running_mean.new_zeros(len(ghosts), 2, self.num_features)
        normalized = [
            # with momentum 1 the buffers become the statistics of this ghost batch
            functional.batch_norm(
                ghost, mean, variance, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps
            )
            for ghost, (mean, variance) in zip(ghosts, statistics, strict=True)
        ]
        update_running_stats(self, *statistics.mean(0))
        return torch.cat(normalized)


class SyncBatchNorm2d(nn.BatchNorm2d):
    """Batch-norm with the statistics over all ranks in training; torch's SyncBatchNorm does not run on CPUs."""

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W). N may differ between ranks."""
        if not self.training:
            return super().forward(input)
        apply: Any = _Normalize.apply
        normalized, mean, variance, count = apply(input, self.weight, self.bias, self.eps)
        update_running_stats(self, mean, variance * count / (count - 1))
        return cast(Tensor, normalized)


class RunningBatchNorm2d(nn.BatchNorm2d):
    """Batch-norm with the running statistics also in training, without updating them."""

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        return functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


@torch.no_grad()
def update_running_stats(layer: nn.BatchNorm2d, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics with a step's mean and (unbiased) variance, as BatchNorm2d does."""
    assert layer.running_mean is not None and layer.running_var is not None and layer.momentum is not None
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), layer.momentum)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), layer.momentum)
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)


def over_all_ranks(statistics: Tensor, count: float) -> float:
    """Replace mean and variance (2, C) of this rank's `count` values by all ranks' and return their number."""
    mean, variance = statistics
    packed = torch.cat([count * mean, count * (variance + mean.square()), mean.new_tensor([count])])
    dist.all_reduce(packed)
    total = float(packed[-1])
    mean_of_all, square = packed[:-1].view(2, -1) / total
    statistics[0] = mean_of_all
    statistics[1] = (square - mean_of_all.square()).clamp_(min=0)
    return total


class _Normalize(torch.autograd.Function):
    """Batch normalization (Ioffe and Szegedy 2015, arXiv:1502.03167) over all ranks, with two all-reduces per layer."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Any, ...]:
        local_count = images.numel() // images.shape[1]
        # in float64: the mean of squares minus the square of the mean is a small difference of large numbers
        own_variance, own_mean = torch.var_mean(images, (0, 2, 3), correction=0)
        statistics = torch.stack([own_mean, own_variance]).double()
        count = over_all_ranks(statistics, local_count)
        mean, variance = statistics
        scale = (variance + eps).rsqrt()
        narrow = [value.to(weight.dtype) for value in (mean, scale)]
        ctx.save_for_backward(images, weight, *narrow)
        ctx.count = count
        normalized = functional.batch_norm(
            images, narrow[0], variance.to(weight.dtype), weight, bias, training=False, eps=eps
        )
        ctx.mark_non_differentiable(mean, variance)
        return normalized, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute dL/dx = scale w (g - mean(g) - xhat mean(g xhat)), g = dL/dy, with means over all ranks."""
        images, weight, mean, scale = ctx.saved_tensors
        gradient = gradients[0]

        def by_channel(values: Tensor) -> Tensor:
            return values.view(1, -1, 1, 1)

        centered = images - by_channel(mean)
        own_bias, own_weight = gradient.sum((0, 2, 3)), (gradient * centered).sum((0, 2, 3))
        # Of the same size and dtype as the native layer's, which another rank may use for its images.
        sums = torch.cat([own_bias, own_weight]).double()
        dist.all_reduce(sums)
        mean_g, mean_gx = (sums / ctx.count).to(scale.dtype).view(2, -1)
        input_gradient = gradient - by_channel(mean_g) - centered * by_channel(scale.square() * mean_gx)
        return input_gradient * by_channel(scale * weight), own_weight * scale, own_bias, None


def activate(layer: nn.Module, _images: Any, normalized: Tensor) -> Tensor:
    """Apply the dropout and activation that timm's BatchNormAct2d has as children, (N, C, H, W) -> (N, C, H, W).

    As a forward hook of a BatchNorm2d, it makes the layer a BatchNormAct2d that can be replaced by our batch-norms.
    """
    outputs: Tensor = layer.act(layer.drop(normalized))  # type: ignore[operator]
    return outputs
