"""DDP communication hooks: the all-reduce of a gradient bucket, in full precision or as bfloat16.

They add up the gradients of all ranks. DDP itself divides the sums by the number of ranks, another pass over all
gradients; the loss has that factor here.
"""

import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future


@dataclass(slots=True)
class AllReduceHook:
    """The sum of gradients over the ranks, and the time when a step's last bucket was ready.

    The rest of the backward pass after that time is waiting for communication.
    """

    last_ready_s: float = 0.0

    def hook(self, group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        """Add up a bucket of gradients over the ranks."""
        self.last_ready_s = time.perf_counter()
        summed: Future[Tensor] = _all_reduce(bucket.buffer(), group).then(_first)
        return summed

    def reset(self) -> None:
        """Drop what is kept from earlier gradients, because they contained NaN or Inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16Bucket:
    """What a bucket keeps from step to step: its rounding errors, and its gradients as bfloat16."""

    parameters: tuple[Tensor, ...]
    errors: Tensor
    compressed: Tensor

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the bucket has these parameters, in this order."""
        return len(parameters) == len(self.parameters) and all(map(operator.is_, parameters, self.parameters))


@dataclass(slots=True)
class Bf16AllReduceHook(AllReduceHook):
    """Gradients added up as bfloat16, half the bytes; each rank adds its rounding errors to its next gradients.

    `residuals` are the errors of each parameter's gradient, flat, whatever bucket it is in: DDP rebuilds its buckets
    after the first step.

    Error feedback: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014, section 3.
    """

    residuals: dict[Tensor, Tensor] = field(default_factory=dict)
    buckets: dict[int, Bf16Bucket] = field(default_factory=dict)

    def hook(self, group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        """Add up a bucket of float32 gradients over the ranks."""
        self.last_ready_s = time.perf_counter()
        gradients, kept = bucket.buffer(), self._kept(bucket)
        gradients.add_(kept.errors)
        kept.compressed.copy_(gradients)
        torch.sub(gradients, kept.errors.copy_(kept.compressed), out=kept.errors)  # of one type: no temporary copy

        def decompress(done: Future[list[Tensor]]) -> Tensor:
            return gradients.copy_(done.value()[0])

        summed: Future[Tensor] = _all_reduce(kept.compressed, group).then(decompress)
        return summed

    def reset(self) -> None:
        """Drop the rounding errors of gradients that contained NaN or Inf."""
        self.residuals.clear()
        self.buckets.clear()

    def _kept(self, bucket: GradBucket) -> Bf16Bucket:
        """The bucket's buffers; new ones, with the errors that its parameters have, where it is a new bucket."""
        parameters = tuple(bucket.parameters())
        kept = self.buckets.get(bucket.index())
        if kept is None or not kept.holds(parameters):
            errors = torch.zeros_like(bucket.buffer())
            parts = torch.split(errors, [parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if parameter in self.residuals:
                    part.copy_(self.residuals[parameter])
                self.residuals[parameter] = part
            kept = Bf16Bucket(
                parameters=parameters, errors=errors, compressed=torch.empty_like(errors, dtype=torch.bfloat16)
            )
            self.buckets[bucket.index()] = kept
        return kept


def _all_reduce(values: Tensor, group: dist.ProcessGroup | None) -> Future[list[Tensor]]:
    """The sum over the ranks, in place. dist.all_reduce does the same, and costs a small network's step more."""
    work = (group or dist.group.WORLD).allreduce([values])  # type: ignore[union-attr]
    summed: Future[list[Tensor]] = work.get_future()
    return summed


def _first(done: Future[list[Tensor]]) -> Tensor:
    return done.value()[0]


HOOKS = {"none": AllReduceHook, "bf16": Bf16AllReduceHook}
