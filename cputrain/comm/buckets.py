"""Communication hooks of DistributedDataParallel: all-reduce in float32 or bfloat16; measurements for its bucket size.

The hooks sum gradients over ranks. DDP would divide the sums by the number of ranks, in an extra pass over the
gradients; here the loss includes this factor.
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

from cputrain.affinity.planner.step_time import MEASURED_BYTES, fit_alpha_beta

ROUNDS = 5


def measure_alpha_beta() -> tuple[float, float]:
    """Measure alpha and beta of the default group's float32 all-reduce; all ranks return the slowest rank's values."""
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
    """All-reduce hook that also records when a step's last bucket became ready.

    From then on, the backward pass only waits for communication.
    """

    last_ready_s: float = 0.0

    def hook(self, group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        """All-reduce a bucket of gradients."""
        self.last_ready_s = time.perf_counter()
        return _all_reduce(bucket.buffer(), bucket, group, _itself)

    def reset(self) -> None:
        """Discard state from earlier gradients, which contained NaN or Inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16Bucket:
    """Buffers of a bucket: its rounding errors, and its gradients as bfloat16."""

    parameters: tuple[Tensor, ...]
    errors: Tensor
    compressed: Tensor

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether the bucket has these parameters, in this order."""
        return len(parameters) == len(self.parameters) and all(map(operator.is_, parameters, self.parameters))


@dataclass(slots=True)
class Bf16AllReduceHook(AllReduceHook):
    """All-reduce hook that sends gradients as bfloat16, half the bytes, with error feedback: each rank adds its
    rounding errors to its next gradients (Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014, 3).

    `residuals` has the flattened errors by parameter and not by bucket, because DDP rebuilds its buckets after the
    first step.
    """

    residuals: dict[Tensor, Tensor] = field(default_factory=dict)
    buckets: dict[int, Bf16Bucket] = field(default_factory=dict)

    def hook(self, group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        """All-reduce a bucket of float32 gradients."""
        self.last_ready_s = time.perf_counter()
        gradients, kept = bucket.buffer(), self._kept(bucket)
        gradients.add_(kept.errors)
        kept.compressed.copy_(gradients)
        # The copy converts bfloat16 to float32 first: operands of one dtype need no temporary copy.
        torch.sub(gradients, kept.errors.copy_(kept.compressed), out=kept.errors)
        return _all_reduce(kept.compressed, bucket, group, gradients.copy_)

    def reset(self) -> None:
        """Discard the rounding errors of gradients that contained NaN or Inf."""
        self.residuals.clear()
        self.buckets.clear()

    def _kept(self, bucket: GradBucket) -> Bf16Bucket:
        """Return the bucket's buffers; for a new bucket, allocate them and copy its parameters' errors into them."""
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
    """All-reduce `values` in place and return a future of `finish(values)`.

    This has less overhead than dist.all_reduce, which matters for small networks. It waits for the last bucket at once,
    because no computation is left to overlap; a callback would run in the backend's thread and need the GIL there.
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
