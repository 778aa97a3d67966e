"""What happens to a bucket of gradients on its way through DDP."""

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future


@dataclass(slots=True)
class CommClock:
    """When a step's last gradient was ready: what the backward pass takes after that is waiting for communication."""

    last_ready_s: float = 0.0

    def hook(self, group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        """DDP's own averaging, with the time noted."""
        self.last_ready_s = time.perf_counter()
        return allreduce_hook(group, bucket)  # type: ignore[arg-type]

    def forget(self) -> None:
        """The last step's gradients were no numbers: keep nothing of them."""


@dataclass(slots=True)
class Bf16Gradients(CommClock):
    """Gradients summed as bfloat16, half the bytes; what rounding took from a rank's own is added to its next ones.

    Error feedback: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014, section 3.
    """

    left_over: dict[int, Tensor] = field(default_factory=dict)

    def hook(self, group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        """Average a bucket of float32 gradients over the ranks."""
        self.last_ready_s = time.perf_counter()
        gradients, index = bucket.buffer(), bucket.index()
        kept = self.left_over.get(index)
        if kept is not None and kept.shape == gradients.shape:  # DDP cuts its buckets anew after the first step
            gradients.add_(kept)
        short = gradients.to(torch.bfloat16)
        self.left_over[index] = gradients - short
        ranks = dist.get_world_size(group)
        work = dist.all_reduce(short, group=group, async_op=True)
        assert work is not None

        def bring_back(done: Future[list[Tensor]]) -> Tensor:
            return gradients.copy_(done.value()[0]).div_(ranks)

        averaged: Future[Tensor] = work.get_future().then(bring_back)
        return averaged

    def forget(self) -> None:
        """What rounding took from gradients that were no numbers is none either."""
        self.left_over.clear()


HOOKS = {"none": CommClock, "bf16": Bf16Gradients}
