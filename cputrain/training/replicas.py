"""The ranks' replicas of the network: compared every so many steps, as each rank computes its own."""

import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from affinity.errors import RunError
from affinity.wording import counted, first_named
from cputrain.comm.group import all_gather

MODULUS = 1 << 64
FACTOR = 0x9E3779B97F4A7C15  # odd, so that each tensor's place counts
READS, BEYOND_CACHES = 3, 64 << 20  # times of reading that tell the memory's speed, and bytes from which on they do
ROUNDING = 1e-4  # of a tensor's norm: what ranks that round differently may differ by


@dataclass(slots=True, kw_only=True)
class ReplicaCheck:
    """Compares the ranks' weights and optimizer state: all ranks apply the same gradients to the same weights, so they
    stay the same bit for bit. Not batch-norm's running statistics, which are each rank's own. Every checkpoint is of
    replicas that were compared.

    Ranks whose processors or numbers of threads differ may round norms differently (LARS, LAMB, clipping): what so
    small a difference makes is replaced by rank 0's values, with a warning. `same_after` is the last step after which
    the replicas were the same; `wait` waits until the last checkpoint is written; `hosts` are those of the ranks. To be
    used alike by all ranks.
    """

    network: nn.Module
    optimizer: Optimizer
    every: int | None
    warn: Callable[[int, str], None]
    wait: Callable[[], None]
    same_after: int
    _reads_s: deque[float] = field(default_factory=lambda: deque(maxlen=READS))
    hosts: tuple[str, ...] = field(init=False)
    _alike: bool = field(init=False)
    _warned: bool = False

    def __post_init__(self) -> None:
        arithmetic = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
        self.hosts, found = zip(*all_gather((socket.gethostname(), arithmetic)), strict=True)
        self._alike = len(set(found)) == 1

    @property
    def read_s(self) -> float:
        """How long this rank reads its replica from memory, the least of the last times; 0 where that is not known."""
        return min(self._reads_s, default=0.0)

    def after_step(self, step: int) -> None:
        """Compare where a comparison is due."""
        if self.every is not None and step % self.every == 0:
            self.compare(step)

    def compare(self, step: int) -> None:
        """Compare the replicas after this step, unless that is done or not wanted. Raises RunError on the first of the
        ranks that differ, after the last checkpoint is written; the others wait until that ends them."""
        if self.every is None or len(self.hosts) == 1 or step == self.same_after:
            return
        tensors = replica_tensors(self.network, self.optimizer)
        begun = time.perf_counter()
        own = bit_sum(tensors)
        if sum(tensor.nbytes for tensor in tensors) >= BEYOND_CACHES:
            self._reads_s.append(time.perf_counter() - begun)
        extremes = torch.tensor([own, ~own])  # of all ranks: the largest, and the complement of the smallest
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        if int(extremes[0]) != ~int(extremes[1]):
            differing = odd_ranks(all_gather(own))
            if self._alike or not self._rounded(tensors):
                self._end(differing, step)
            self._take_from_first(tensors, differing, step)
        self.same_after = step

    def _end(self, differing: Sequence[int], step: int) -> None:
        self.wait()
        dist.barrier()  # rank 0 has completed the last checkpoint
        if dist.get_rank() == differing[0]:
            raise RunError(describe_difference(differing, self.hosts, step, self.same_after))
        dist.barrier()  # the rank that raises exits, which ends this wait

    def _rounded(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all ranks differ from rank 0 by no more than rounding."""
        furthest = torch.zeros(1, dtype=torch.float64)
        for tensor in tensors:
            first = in_memory_order(tensor).clone()
            dist.broadcast(first, src=0)
            distance = (in_memory_order(tensor).double() - first).norm() / first.double().norm().clamp(min=1e-30)
            furthest = torch.maximum(furthest, torch.nan_to_num(distance.reshape(1), nan=torch.inf))
        dist.all_reduce(furthest, op=dist.ReduceOp.MAX)
        return float(furthest) <= ROUNDING

    def _take_from_first(self, tensors: Sequence[Tensor], differing: Sequence[int], step: int) -> None:
        for tensor in tensors:
            dist.broadcast(in_memory_order(tensor), src=0)
        if not self._warned:
            self._warned = True
            named = first_named([f"{rank} on {self.hosts[rank]}" for rank in differing])
            self.warn(
                step,
                f"the ranks have different processors or numbers of threads and round differently ({named} from the "
                f"others): all take rank 0's weights, now and whenever they are compared",
            )


def replica_tensors(network: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """The tensors that are the same on all ranks: weights, and the optimizer's state of each."""
    tensors: list[Tensor] = []
    for weight in network.parameters():
        entries = optimizer.state.get(weight, {})
        tensors += [weight.detach(), *(entry for entry in entries.values() if isinstance(entry, Tensor))]
    return tensors


def in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor's values in the order in which they lie in memory (channels-last as well), without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))


def bit_sum(tensors: Iterable[Tensor]) -> int:
    """The sum of the tensors' bits, read as 64-bit integers, each tensor's with a factor of its own; modulo 2^64, as a
    signed integer. One changed bit changes it, and the order in which threads add does not."""
    sums = []
    for tensor in tensors:
        data = in_memory_order(tensor).view(torch.uint8)
        if data.storage_offset() % 8:
            data = data.clone()
        words = len(data) // 8 * 8
        sums.append(data[:words].view(torch.int64).sum() + data[words:].sum())
    total = 0
    for one in torch.stack(sums).tolist():
        total = (total * FACTOR + one) % MODULUS
    return total - MODULUS if total >= MODULUS >> 1 else total


def odd_ranks(sums: Sequence[int]) -> list[int]:
    """The ranks whose sum is not that of more than half of all; every rank where no sum is."""
    common = max(set(sums), key=sums.count)
    if sums.count(common) * 2 <= len(sums):
        return list(range(len(sums)))
    return [rank for rank, own in enumerate(sums) if own != common]


def describe_difference(differing: Sequence[int], hosts: Sequence[str], step: int, same_after: int) -> str:
    """A line about ranks whose replicas differ."""
    named = first_named([f"{rank} on {hosts[rank]}" for rank in differing])
    since = f"after step {step:,}; after step {same_after:,} they were the same"
    others = counted(len(hosts) - len(differing), "other rank")
    if len(differing) == len(hosts):
        who = f"ranks {named} have different weights {since}"
        return f"{who}: memory or processor of one of them may be faulty: test them, then continue with --resume"
    if len(differing) == 1:
        who, blame, them = f"rank {named} differs from the {others} in its weights {since}", "this host", "it"
    else:
        who, blame, them = f"ranks {named} differ from the {others} in their weights {since}", "these hosts", "them"
    return f"{who}: memory or processor of {blame} may be faulty: leave {them} out and continue with --resume"
