"""What is watched beside the steps: equal replicas, slow ranks, cores, losses that are not finite.

A new watcher is a class here and a line in the list in loop.py.
"""

import math
import os
import resource
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from cputrain.affinity.errors import RunError
from cputrain.affinity.topology.machine import parse_list
from cputrain.affinity.wording import counted, first_named
from cputrain.checkpoints import list_checkpoints
from cputrain.comm.group import all_gather
from cputrain.data.formats.dataset import Images, is_too_damaged, refusal
from cputrain.files import CHECKPOINTS
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import DIVERGENCE_FACTOR
from cputrain.training.log import TrainingLog
from cputrain.training.saving import Position, find_newest, put_back, set_damaged_aside
from cputrain.training.step import Accuracy, EpochMetrics, StepResult, StepSettings, TrainState, Watcher

MODULUS = 1 << 64
FACTOR = 0x9E3779B97F4A7C15  # odd, so that each tensor's place counts
READS, BEYOND_CACHES = 3, 64 << 20  # times of reading that tell the memory's speed, and bytes from which on they do
ROUNDING = 1e-4  # of a tensor's norm: what ranks that round differently may differ by


@dataclass(slots=True, kw_only=True)
class ReplicaCheck(Watcher):
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

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Compare where a comparison is due."""
        if self.every is not None and step % self.every == 0:
            self.before_save(step)

    def before_save(self, step: int) -> None:
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


STEAL = 7  # places in a line of /proc/stat: user nice system idle iowait irq softirq steal guest guest_nice
WAITING = (3, 4)  # idle, iowait


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """Shares, 0 to 1, of the CPU time of a rank's PUs: taken by the hypervisor, and by other processes, those on the
    other threads of its cores included; the mean clock in MHz, 0 if unknown; page faults that needed a disk, a second.
    """

    steal: float
    others: float
    mhz: float
    faults_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counters:
    at: float
    busy_s: float
    steal_s: float
    own_s: float
    faults: int


class CoreUsage:
    """The use of PUs by this process and by others since `restart`."""

    def __init__(self, pus: Collection[int], root: Path = Path("/")) -> None:
        self._root, self._pus = root, sorted(pus)
        self._siblings = {sibling for pu in pus for sibling in self._threads_of_core(pu)}
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._before = self._read()

    def since_restart(self) -> Used:
        """What was used since then."""
        before, now = self._before, self._read()
        seconds = max(now.at - before.at, 1e-9)
        pus_s = len(self._pus) * seconds
        others_s = (now.busy_s - before.busy_s) - (now.own_s - before.own_s)
        return Used(
            steal=max(0.0, now.steal_s - before.steal_s) / pus_s,
            others=max(0.0, others_s) / pus_s,
            mhz=self._mhz(),
            faults_per_s=(now.faults - before.faults) / seconds,
        )

    def _read(self) -> _Counters:
        busy = steal = 0
        try:
            lines = (self._root / "proc/stat").read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        for line in lines:
            name, *fields = line.split()
            if not name.startswith("cpu") or not name[3:].isdigit() or int(name[3:]) not in self._siblings:
                continue
            ticks = [int(field) for field in fields]
            busy += sum(ticks[:STEAL]) - sum(ticks[i] for i in WAITING)  # guests' time is in user's, too
            steal += ticks[STEAL]
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        return _Counters(
            at=time.monotonic(),
            busy_s=busy * tick_s,
            steal_s=steal * tick_s,
            own_s=time.process_time(),
            faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        )

    def _threads_of_core(self, pu: int) -> list[int]:
        try:
            text = (self._cpu(pu) / "topology/thread_siblings_list").read_text(encoding="utf-8")
        except OSError:
            return [pu]
        return [*parse_list(text.strip())]

    def _mhz(self) -> float:
        clocks = []
        for pu in self._pus:
            try:
                clocks.append(int((self._cpu(pu) / "cpufreq/scaling_cur_freq").read_text(encoding="utf-8")) / 1000)
            except (OSError, ValueError):
                return 0.0
        return sum(clocks) / len(clocks) if clocks else 0.0

    def _cpu(self, pu: int) -> Path:
        return self._root / f"sys/devices/system/cpu/cpu{pu}"


EVERY_STEPS = 50
LEAST_S = 2.0  # of steps: the kernel counts CPU time in hundredths of a second
SLOWER = 1.15
SHARE = 0.03  # of the CPU time of a rank's PUs, beyond the typical rank's
FAULTS_PER_S = 50.0
CLOCK, READING = 0.93, 1.15  # of the typical rank's


class Pace(NamedTuple):
    """A rank's last steps. `step_s` is the median time of a step without waiting for other ranks, `data_wait_s` the
    part of it that was waiting for images, `total_s` the seconds of these steps; `read_s` is the time of reading its
    weights, 0 if unknown. The others are as in Used.
    """

    step_s: float
    data_wait_s: float
    total_s: float
    steal: float
    others: float
    mhz: float
    faults_per_s: float
    read_s: float
    threads: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A slow rank: how many times as long its steps take as the median rank's, and the likely cause, with its kind."""

    rank: int
    factor: float
    kind: str
    cause: str


@dataclass(slots=True, kw_only=True)
class StragglerWatch(Watcher):
    """Measures this rank's pace on its `pus` and compares it with the others'; a rank is named once, until it or its
    cause changes, and then after twice as many comparisons. `read_s` returns what `Pace` has. Rank 0 reports."""

    hosts: Sequence[str]
    warn: Callable[..., None]
    pus: Sequence[int]
    read_s: Callable[[], float]
    usage: CoreUsage = field(init=False)
    _steps: list[tuple[float, float]] = field(default_factory=list)
    _due: int = EVERY_STEPS
    _comparisons: int = 0
    _slow: frozenset[tuple[int, str]] = frozenset()
    _named: dict[tuple[int, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.usage = CoreUsage(self.pus)

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Add a step of this rank, and compare the ranks where that is due."""
        self._steps.append((seconds - result.comm_wait_s, result.data_wait_s))
        if len(self.hosts) > 1 and step % EVERY_STEPS == 0 and len(self._steps) >= self._due:
            self._compare(step)

    def _compare(self, step: int) -> None:
        paces = [Pace(*row) for row in every_rank(self._pace()).tolist()]
        shortest_s = min(pace.total_s for pace in paces)
        self._due = max(EVERY_STEPS, ceil(len(self._steps) * LEAST_S / max(shortest_s, 1e-3)))  # the same on all ranks
        if shortest_s < LEAST_S:
            return  # too short to tell: the next comparison has these steps, too
        self._steps.clear()
        self.usage.restart()
        self._comparisons += 1
        found = find_stragglers(paces)
        for one in to_name(found, slow=self._slow, named=self._named, comparison=self._comparisons):
            self._named[one.rank, one.kind] = self._comparisons
            host, factor, cause = self.hosts[one.rank], one.factor, one.cause
            what = f"rank {one.rank} on {host} takes {factor:.2f} times as long for a step as the median rank: {cause}"
            self.warn(step, what, rank=one.rank, host=host, factor=factor, cause=cause)
        self._slow = frozenset((one.rank, one.kind) for one in found)

    def _pace(self) -> Pace:
        return Pace(
            step_s=median(step_s for step_s, _ in self._steps),
            data_wait_s=median(wait_s for _, wait_s in self._steps),
            total_s=sum(step_s for step_s, _ in self._steps),
            read_s=self.read_s(),
            threads=torch.get_num_threads(),
            **asdict(self.usage.since_restart()),
        )


def every_rank(values: Sequence[float]) -> Tensor:
    """Each rank's n values, shape (ranks, n), float64, in one small exchange: each adds its row to zeros."""
    rows = torch.zeros(dist.get_world_size(), len(values), dtype=torch.float64)
    rows[dist.get_rank()] = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(rows)
    return rows


def find_stragglers(paces: Sequence[Pace]) -> list[Straggler]:
    """The ranks whose steps take 15 % longer than the median rank's; of two ranks the faster one is the median."""
    typical = sorted(paces, key=lambda pace: pace.step_s)[(len(paces) - 1) // 2]
    found = []
    for rank, pace in enumerate(paces):
        if pace.step_s > SLOWER * typical.step_s:
            kind, cause = likely_cause(pace, typical)
            found.append(Straggler(rank=rank, factor=pace.step_s / typical.step_s, kind=kind, cause=cause))
    return found


def to_name(
    found: Sequence[Straggler],
    *,
    slow: Collection[tuple[int, str]],
    named: Mapping[tuple[int, str], int],
    comparison: int,
) -> list[Straggler]:
    """Those (rank, kind) that were not `slow` in the comparison before; of those that come and go, with the comparison
    in which they were `named`, after twice as many: else each comparison of short steps could name them again."""
    return [
        one
        for one in found
        if (one.rank, one.kind) not in slow and comparison >= 2 * named.get((one.rank, one.kind), 0)
    ]


def likely_cause(pace: Pace, typical: Pace) -> tuple[str, str]:
    """Why a rank is slower than a typical one, in a word and in words."""
    lost_s = pace.step_s - typical.step_s
    if pace.data_wait_s - typical.data_wait_s > lost_s / 2:
        waits = f"{pace.data_wait_s:.3g} s of each step, the median rank {typical.data_wait_s:.3g} s"
        return "loader", f"it waits for its images {waits}: its disk or its loader cores are slow"
    if pace.steal - typical.steal > SHARE:
        return "steal", f"the hypervisor takes {pace.steal:.0%} of the CPU time of its cores (steal)"
    if pace.others - typical.others > SHARE:
        return "others", f"other processes use {pace.others:.0%} of the CPU time of its cores"
    if pace.faults_per_s - typical.faults_per_s > FAULTS_PER_S:
        return "memory", f"its host is short of memory: {pace.faults_per_s:.0f} pages a second are read from disk"
    if pace.mhz and pace.mhz < CLOCK * typical.mhz:
        return "clock", f"its cores run at {pace.mhz:,.0f} MHz, the median rank's at {typical.mhz:,.0f}"
    if pace.threads < typical.threads:
        threads = f"it has {pace.threads:.0f} threads, the median rank {typical.threads:.0f}"
        return "threads", f"{threads}: set plan.balance=batch"
    if typical.read_s and pace.read_s > READING * typical.read_s:
        times = pace.read_s / typical.read_s
        return "bandwidth", f"its memory is slow: reading its weights takes {times:.1f} times as long"
    return "unknown", "its host's counters show no cause: compare it with another host (cputrain bench model)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageCheck:
    """Ends a training with too many damaged images, on all ranks after the same step or evaluation.

    `share` is data.max_damaged; `wait` waits until the last checkpoint is written.
    """

    splits: Mapping[str, Images]
    share: float
    wait: Callable[[], None]

    def epoch(self, own: EpochMetrics, *, damaged: float, readable: float, ended: bool) -> None:
        """Check an epoch so far, by this rank's metrics and the sums over all ranks; in one that has `ended` some image
        must have been readable. Raises InputError."""
        self._check("train", own.damaged, damaged, readable, ended=ended)

    def evaluation(self, split: str, accuracy: Accuracy) -> None:
        """Check a whole evaluation of a split. Raises InputError."""
        damaged = len(self.splits[split]) - accuracy.images
        self._check(split, accuracy.damaged, damaged, accuracy.images, ended=True)

    def _check(self, split: str, own: Sequence[str], damaged: float, readable: float, *, ended: bool) -> None:
        images = len(self.splits[split])
        if is_too_damaged(damaged, images, self.share) or (ended and damaged and not readable):
            lines = sorted(line for of_rank in all_gather(own) for line in of_rank)
            self.wait()
            raise refusal(split, lines, int(damaged + readable), images, self.share)


INTERVAL_S, PER_RANK_S = 10.0, 0.1  # between records at least: so events.jsonl grows by 300 bytes/s at most
MOST_STEPS, SECOND_STEPS = 100_000, 100  # the first step, which is slow, tells little of the others


@dataclass(slots=True, kw_only=True)
class RankTimes(Watcher):
    """This rank's seconds since the last record: whole steps, waiting for communication, waiting for data.

    The damaged images of the epoch of `position` are added up in the same exchange, and checked by `damage`.

    `set_pace` hears of the slowest rank's mean step at each record of several steps: the first step is slow.

    Every rank takes part in a record after the same step: the first one, then as many steps later as the slowest rank
    needs for the interval, which all ranks compute from the same numbers.
    """

    log: TrainingLog
    position: Position
    damage: DamageCheck
    set_pace: Callable[[float], None]
    steps: int = 0
    due: int = 1
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Add a step of this rank."""
        for i, value in enumerate((seconds, result.comm_wait_s, result.data_wait_s)):
            self.sums[i] += value
        self.steps += 1
        if self.steps >= self.due:
            self.after_last_step(step)

    def after_last_step(self, step: int) -> None:
        """Log the mean step of every rank since the last record, if there was one.

        Raises InputError where too many images are damaged.
        """
        if not self.steps:
            return
        epoch = self.position.epoch
        table = every_rank([*(value / self.steps for value in self.sums), len(epoch.damaged), epoch.images])
        slowest_s = float(table[:, 0].max())
        if self.steps > 1:
            self.set_pace(slowest_s)
        interval_s = max(INTERVAL_S, PER_RANK_S * len(table))
        most = MOST_STEPS if self.steps > 1 else SECOND_STEPS
        self.due = min(max(round(interval_s / max(slowest_s, 1e-9)), 1), most)
        *times, damaged, readable = table.T.tolist()
        self.log.rank_times(step, self.steps, times)
        self.steps, self.sums = 0, [0.0, 0.0, 0.0]
        self.damage.epoch(epoch, damaged=sum(damaged), readable=sum(readable), ended=False)


MAX_ROLLBACKS = 3  # to one checkpoint


@dataclass(slots=True, kw_only=True)
class NonFiniteHandler(Watcher):
    """Handles steps whose gradients contain NaN or Inf; `warn` gets a step and a line, `wait` waits until the last
    checkpoint is written."""

    recipe: Recipe
    rank: int
    state: TrainState
    warn: Callable[[int, str], None]
    position: Position
    wait: Callable[[], None]

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Skip a step whose gradients are not finite or restore the last checkpoint; else raise RunError on the rank
        where NaN or Inf arose. The step is named as the schedule counts it, from 0."""
        if result.finite:
            return
        step -= 1
        message, origin = _describe(all_gather((result.loss, result.non_finite)), step, settings.lr)
        if self.recipe.on_nan == "skip":
            self.warn(step, f"{message}: the step is skipped")
            return
        self.wait()
        dist.barrier()  # rank 0 has completed the last checkpoint
        folder, rollbacks = self.recipe.folder / CHECKPOINTS, self.position.rollbacks
        found = find_newest(folder, self.rank) if self.recipe.on_nan == "rollback" else None
        if found and rollbacks.get(found.path.name, 0) < MAX_ROLLBACKS:
            set_damaged_aside(found, self.warn, step, self.rank)
            put_back(found, self.state, self.recipe.optim.name)
            rollbacks[found.path.name] = rollbacks.get(found.path.name, 0) + 1
            self.warn(step, f"{message}: restored {found.path.name}, training continues with the next images")
            return
        if self.rank == origin:
            saved = list_checkpoints(folder)
            kept = f"; checkpoint {saved[-1]} is kept" if saved else ""
            raise RunError(f"{message}: lower schedule.peak_rate, or set on_nan to skip or rollback{kept}")
        dist.barrier()  # the rank that raises exits, which ends this wait


def _describe(results: list[tuple[float, str]], step: int, lr: float) -> tuple[str, int]:
    """A line about the first rank whose outputs contain NaN or Inf, else about the gradients; and the rank."""
    first = next((rank for rank, (_, non_finite) in enumerate(results) if non_finite), 0)
    loss, non_finite = results[first]
    where = non_finite or "NaN or Inf in the gradients only"
    return f"rank {first}: loss {loss:g} at step {step}, {where}, learning rate {lr:g}", first


@dataclass(slots=True, kw_only=True)
class DivergenceCheck(Watcher):
    """Warns once of a loss that diverges, which shows a learning rate that is too high long before NaN."""

    warn: Callable[[int, str], None]
    position: Position

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Compare a step's loss with the first one."""
        loss, first = result.loss, self.position.first_loss
        if first is None:
            self.position.first_loss = loss if math.isfinite(loss) else None
        elif loss > DIVERGENCE_FACTOR * first > 0 and not self.position.diverged:  # one's own loss may be negative
            self.position.diverged = True
            self.warn(
                step,
                f"the loss is {loss:.3g} at step {step}, {loss / first:.0f} times that of the first step, "
                f"learning rate {settings.lr:g}: lower schedule.peak_rate, or lengthen the warm-up",
            )
