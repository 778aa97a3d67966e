"""DistributedDataParallel's communication hooks: the all-reduce of gradients, in float32 or as bfloat16.

The trainer's hooks sum gradients over ranks. DDP would divide the sums by the number of ranks, in an extra pass over
the gradients; the trainer's loss includes this factor. For any other loop, gradients are the mean:
`from cputrain.comm import compress_bf16`.
"""

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: see group.py
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


@dataclass(slots=True)
class AllReduceHook:
    """All-reduce hook that also records when a step's last bucket became ready, and that it did.

    From then on, the backward pass only waits for communication. Without it (`finished` is False), a parameter had no
    gradient, and its bucket is not summed.
    """

    last_ready_s: float = 0.0
    finished: bool = False
    # The last operation of each bucket, by index. A thread of gloo that frees one needs the GIL, and a program that
    # ends just then would wait for that thread for ever, as DDP's end waits for it with the GIL.
    works: dict[int, dist.Work] = field(default_factory=dict)

    def hook(self, group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        """All-reduce a bucket of gradients."""
        self.last_ready_s, self.finished = time.perf_counter(), bucket.is_last()
        return self._all_reduce(bucket.buffer(), bucket, group, _itself)

    def reset(self) -> None:
        """Discard state from earlier gradients, which contained NaN or Inf."""

    def _all_reduce(
        self, values: Tensor, bucket: GradBucket, group: dist.ProcessGroup | None, finish: Callable[[Tensor], Tensor]
    ) -> Future[Tensor]:
        """All-reduce `values` in place and return a future of `finish(values)`.

        This has less overhead than dist.all_reduce, which matters for small networks. It waits for the last bucket at
        once, because no computation is left to overlap; a callback would run in the backend's thread and need the GIL
        there.
        """
        work = (group or dist.group.WORLD).allreduce([values])  # type: ignore[union-attr]
        self.works[bucket.index()] = work
        if bucket.is_last():
            work.wait()
            summed: Future[Tensor] = Future()
            summed.set_result(finish(values))
            return summed
        return work.get_future().then(lambda done: finish(done.value()[0]))


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
    first step; a state dict has them by the parameter's place among `parameters`.
    """

    mean: bool = False  # the mean over ranks in place of the sum, for one more pass over the gradients
    parameters: tuple[Tensor, ...] = ()
    residuals: dict[Tensor, Tensor] = field(default_factory=dict)
    buckets: dict[int, Bf16Bucket] = field(default_factory=dict)

    def hook(self, group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        """All-reduce a bucket of float32 gradients."""
        self.last_ready_s, self.finished = time.perf_counter(), bucket.is_last()
        gradients, residual = bucket.buffer(), self._kept(bucket)
        gradients.add_(residual.errors)
        residual.compressed.copy_(gradients)
        # The copy converts bfloat16 to float32 first: operands of one dtype need no temporary copy.
        torch.sub(gradients, residual.errors.copy_(residual.compressed), out=residual.errors)
        ranks = dist.get_world_size(group) if self.mean else 1
        return self._all_reduce(residual.compressed, bucket, group, partial(_copied, gradients, ranks))

    def reset(self) -> None:
        """Discard the rounding errors of gradients that contained NaN or Inf."""
        self.residuals.clear()
        self.buckets.clear()

    def state_dict(self) -> dict[int, Tensor]:
        """Return the rounding errors, which continue a training exactly."""
        numbered = enumerate(self.parameters)
        return {index: self.residuals[weight] for index, weight in numbered if weight in self.residuals}

    def load_state_dict(self, state: Mapping[int, Tensor]) -> None:
        """Load the rounding errors of a state dict."""
        self.reset()
        self.residuals.update({self.parameters[index]: errors.clone() for index, errors in state.items()})

    def _kept(self, bucket: GradBucket) -> Bf16Bucket:
        """Return the bucket's buffers; for a new bucket, allocate them and copy its parameters' errors into them."""
        parameters = tuple(bucket.parameters())
        residual = self.buckets.get(bucket.index())
        if residual is None or not residual.holds(parameters):
            errors = torch.zeros_like(bucket.buffer())
            parts = torch.split(errors, [parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if parameter in self.residuals:
                    part.copy_(self.residuals[parameter])
                self.residuals[parameter] = part
            residual = Bf16Bucket(
                parameters=parameters, errors=errors, compressed=torch.empty_like(errors, dtype=torch.bfloat16)
            )
            self.buckets[bucket.index()] = residual
        return residual


class Float32AllReduceHook(AllReduceHook):
    """All-reduce hook that sums in float32, also gradients of bfloat16 weights; they become the mean over ranks."""

    def hook(self, group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        """All-reduce a bucket of float32 or bfloat16 gradients."""
        self.last_ready_s, self.finished = time.perf_counter(), bucket.is_last()
        gradients = bucket.buffer()
        finish = partial(_mean, gradients, dist.get_world_size(group))
        return self._all_reduce(gradients.float(), bucket, group, finish)


def _mean(gradients: Tensor, ranks: int, summed: Tensor) -> Tensor:
    return gradients.copy_(summed.div_(ranks))


def _itself(summed: Tensor) -> Tensor:
    return summed


def _copied(gradients: Tensor, ranks: int, summed: Tensor) -> Tensor:
    gradients.copy_(summed)
    return gradients if ranks == 1 else gradients.div_(ranks)


HOOKS = {"none": AllReduceHook, "bf16": Bf16AllReduceHook}


def compress_bf16(ddp: DistributedDataParallel) -> Bf16AllReduceHook:
    """Send the gradients of a DistributedDataParallel network as bfloat16: half the bytes, with error feedback.

    ddp: a network with float32 parameters, before its first backward pass. As without this, gradients are the mean over
    ranks. Each rank adds its rounding errors of a step to its gradients of the next one, and stores them: 4 bytes a
    parameter, and 2 for the bfloat16. The sums over ranks are rounded, too. Source: Seide et al., 1-Bit Stochastic
    Gradient Descent, Interspeech 2014, 3.
    Returns the hook, whose reset() discards these errors after gradients with NaN or Inf, and which checkpoints must
    have to continue exactly: it has state_dict and load_state_dict.
    Raises ValueError if a trained parameter is not float32, and DDP's RuntimeError if it has a hook already.
    """
    dtypes = {p.dtype for p in ddp.parameters() if p.requires_grad} - {torch.float32}
    if dtypes:
        raise ValueError(f"compress_bf16 needs float32 parameters, some are {', '.join(sorted(map(str, dtypes)))}")
    hook = Bf16AllReduceHook(mean=True, parameters=tuple(ddp.parameters()))
    ddp.register_comm_hook(None, hook.hook)
    return hook


def reduce_float32(ddp: DistributedDataParallel) -> None:
    """Sum the gradients of a DistributedDataParallel network over ranks in float32, also those of bfloat16 weights
    (`cputrain.optimize(..., master_weights="split")`), whose sums are rounded once, to nearest.

    ddp: a network before its first backward pass. As without this, gradients are the mean over ranks; torch would send
    and sum those of bfloat16 weights as bfloat16.
    Raises DDP's RuntimeError if it has a hook already.
    """
    ddp.register_comm_hook(None, Float32AllReduceHook().hook)
