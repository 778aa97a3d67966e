"""Gradient buckets of DistributedDataParallel and its communication hooks: float32, or rounded to bfloat16.

The hooks add up the gradients of all ranks. DDP itself divides the sums by the number of ranks, another pass over all
gradients; the loss has that factor here.
"""

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from cputrain.measurements import MEASURED_BYTES, fit_alpha_beta

ROUNDS = 5


def measure_alpha_beta() -> tuple[float, float]:
    """Measure alpha and beta of the default group's float32 all-reduce; every rank gets those of the slowest rank."""
    medians = []
    for size in MEASURED_BYTES:
        values, seconds = torch.zeros(size // 4), []
        for _ in range(ROUNDS):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(values)
            seconds.append(time.perf_counter() - started)
        medians.append(median(seconds))
    slowest = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return fit_alpha_beta(list(zip(map(float, MEASURED_BYTES), slowest.tolist(), strict=True)))


@dataclass(slots=True)
class AllReduceHook:
    """The sum of gradients over the ranks, and the time when a step's last bucket was ready.

    The rest of the backward pass after that time is waiting for communication.
    """

    last_ready_s: float = 0.0

    def hook(self, group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        """Add up a bucket of gradients over the ranks."""
        self.last_ready_s = time.perf_counter()
        return _all_reduce(bucket.buffer(), bucket, group, _itself)

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
        return _all_reduce(kept.compressed, bucket, group, gradients.copy_)

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


def _all_reduce(
    values: Tensor, bucket: GradBucket, group: dist.ProcessGroup | None, finish: Callable[[Tensor], Tensor]
) -> Future[Tensor]:
    """`finish` of the sum over the ranks, which is computed in place.

    dist.all_reduce does the same, and costs a small network's step more. The last bucket is waited for at once, as
    nothing is left to compute beside it: a callback runs in the backend's thread, which needs Python's lock for it.
    """
    work = (group or dist.group.WORLD).allreduce([values])  # type: ignore[union-attr]
    if bucket.is_last():
        work.wait()
        summed: Future[Tensor] = Future()
        summed.set_result(finish(values))
        return summed
    return work.get_future().then(lambda done: finish(done.value()[0]))


def _itself(summed: Tensor) -> Tensor:
    return summed


HOOKS = {"none": AllReduceHook, "bf16": Bf16AllReduceHook}
