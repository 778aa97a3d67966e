"""Detect replicas that silently diverge, such as by a faulty memory."""

import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from cputrain.affinity.errors import RunError, Wording, as_option
from cputrain.affinity.wording import first_named, plural
from cputrain.checksums import bit_sum, in_memory_order
from cputrain.comm.group import all_gather
from cputrain.training.state import own_buffers
from cputrain.training.step import StepResult, StepSettings
from cputrain.training.watchers.base import Watcher

READS, BEYOND_CACHES = 3, 64 << 20  # number of read times to keep, and bytes above which they measure memory, not cache
ROUNDING = 1e-4  # largest relative difference of a tensor, in its norm, that counts as rounding


@dataclass(slots=True, kw_only=True)
class ReplicaCheck(Watcher):
    """Detects silent divergence: compares a checksum of weights, optimizer state and buffers across ranks every `every`
    steps and before every checkpoint. All ranks apply the same gradients to the same weights, and take rank 0's buffers
    after each step, so replicas stay bitwise equal; batch-norm's running statistics differ between ranks and are not
    compared.

    Ranks with different processors or numbers of threads may round norms differently (LARS, LAMB, clipping). If the
    difference is no more than rounding, all ranks take rank 0's values, with a warning. `same_after` is the last step
    after which the replicas were equal; `wait` waits for the pending checkpoint; `hosts` has each rank's host. All
    ranks must make the same calls.
    """

    network: nn.Module
    optimizer: Optimizer
    every: int | None
    warn: Callable[[int, str], None]
    wait: Callable[[], None]
    same_after: int
    _reads_s: deque[float] = field(default_factory=lambda: deque(maxlen=READS))
    wording: Wording = as_option
    hosts: tuple[str, ...] = field(init=False)
    _alike: bool = field(init=False)
    _warned: bool = False

    def __post_init__(self) -> None:
        arithmetic = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
        self.hosts, arithmetics = zip(*all_gather((socket.gethostname(), arithmetic)), strict=True)
        self._alike = len(set(arithmetics)) == 1

    @property
    def read_s(self) -> float:
        """Seconds to read this rank's replica from memory, the minimum of the last reads; 0 if unknown."""
        return min(self._reads_s, default=0.0)

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Compare the replicas if a comparison is due."""
        if self.every is not None and step % self.every == 0:
            self.before_save(step)

    def before_save(self, step: int) -> None:
        """Compare the replicas, unless they are already compared after this step or the check is disabled. Raises
        RunError on the first differing rank, after the pending checkpoint; the other ranks wait until the job ends."""
        if self.every is None or len(self.hosts) == 1 or step == self.same_after:
            return
        tensors = replica_tensors(self.network, self.optimizer)
        begun = time.perf_counter()
        checksum = bit_sum(tensors.values())
        if sum(tensor.nbytes for tensor in tensors.values()) >= BEYOND_CACHES:
            self._reads_s.append(time.perf_counter() - begun)
        # One MAX all-reduce gives maximum and minimum, as ~x reverses the order.
        extremes = torch.tensor([checksum, ~checksum])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        if int(extremes[0]) != ~int(extremes[1]):
            differing = odd_ranks(all_gather(checksum))
            if self._alike or not self._rounded(tensors.values()):
                self._end(differing, step, tensors)
            self._take_from_first(tensors.values(), differing, step)
        self.same_after = step

    def _end(self, differing: Sequence[int], step: int, tensors: Mapping[str, Tensor]) -> None:
        self.wait()
        of_ranks = all_gather(
            {name: bit_sum([tensor]) for name, tensor in tensors.items()}
        )  # after the last checkpoint
        if dist.get_rank() == differing[0]:
            names = [name for name in of_ranks[0] if len({sums.get(name) for sums in of_ranks}) > 1]
            trained = {name for name, weight in self.network.named_parameters() if weight.requires_grad}
            untrained = [name for name in names if name not in trained] if trained.isdisjoint(names) else []
            raise RunError(describe_difference(differing, self.hosts, step, self.same_after, untrained, self.wording))
        dist.barrier()  # the rank that raises exits, which ends this wait

    def _rounded(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether all ranks differ from rank 0 by no more than rounding."""
        furthest = torch.zeros(1, dtype=torch.float64)
        for tensor in tensors:
            first = in_memory_order(tensor).clone()
            dist.broadcast(first, src=0)
            distance = (in_memory_order(tensor).double() - first).norm() / first.double().norm().clamp(min=1e-30)
            furthest = torch.maximum(furthest, torch.nan_to_num(distance.reshape(1), nan=torch.inf))
        dist.all_reduce(furthest, op=dist.ReduceOp.MAX)
        return float(furthest) <= ROUNDING

    def _take_from_first(self, tensors: Iterable[Tensor], differing: Sequence[int], step: int) -> None:
        for tensor in tensors:
            first = in_memory_order(tensor)
            dist.broadcast(first, src=0)
            if first.data_ptr() != tensor.data_ptr():  # a copy, because the tensor's memory has gaps
                tensor.copy_(first.view(tensor.shape))
        if not self._warned:
            self._warned = True
            named = first_named([f"{rank} on {self.hosts[rank]}" for rank in differing])
            self.warn(
                step,
                f"the ranks round differently because processors or numbers of threads differ ({named}): all take "
                "rank 0's weights at every comparison",
            )


def replica_tensors(network: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors that must be equal on all ranks, by name: weights, optimizer state, and the buffers of the
    state dict except batch-norm's statistics."""
    tensors: dict[str, Tensor] = {}
    for name, weight in network.named_parameters():
        tensors[name] = weight.detach()
        entries = optimizer.state.get(weight, {})
        tensors |= {f"{name}/{key}": entry for key, entry in entries.items() if isinstance(entry, Tensor)}
    return tensors | own_buffers(network, persistent=True)


def odd_ranks(sums: Sequence[int]) -> list[int]:
    """Return the ranks whose sum differs from the majority's; all ranks if there is no majority."""
    common = max(set(sums), key=sums.count)
    if sums.count(common) * 2 <= len(sums):
        return list(range(len(sums)))
    return [rank for rank, checksum in enumerate(sums) if checksum != common]


def describe_difference(
    differing: Sequence[int],
    hosts: Sequence[str],
    step: int,
    same_after: int,
    untrained: Sequence[str] = (),
    wording: Wording = as_option,
) -> str:
    """Return the error message about ranks whose replicas differ; `untrained` names the tensors that differ if all of
    them are buffers and parameters without gradients, which only the network's own code changes."""
    resume = wording("resume", "true")
    named = first_named([f"{rank} on {hosts[rank]}" for rank in differing])
    since = f"after step {step:,} (equal after step {same_after:,})"
    if untrained:
        plain = first_named([name.removeprefix("network.") for name in untrained])
        return (
            f"ranks {named} differ in {plain} {since}, which no optimizer changes: if the network's code does, use a "
            "buffer and change it in training steps only, as all ranks take rank 0's; else test the hosts' memory"
        )
    others = plural(len(hosts) - len(differing), "other rank")
    if len(differing) == len(hosts):
        test = f"test memory and processors of their hosts, then continue with {resume}"
        return f"ranks {named} have different weights {since}: {test}"
    if len(differing) == 1:
        who = f"rank {named} differs from the {others} in its weights {since}"
        blame = "this host, whose memory or processor may be faulty"
    else:
        who = f"ranks {named} differ from the {others} in their weights {since}"
        blame = "these hosts, whose memory or processors may be faulty"
    return f"{who}: exclude {blame}, and continue with {resume}"
