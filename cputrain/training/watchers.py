"""Watchers of the training loop: replica divergence, slow ranks, core usage, damaged images, NaN and diverging losses.

To add a watcher, add a class here and a line in the list in loop.py.
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

from cputrain.affinity.errors import RunError, Wording, as_option
from cputrain.affinity.kernel.binding import threads_of
from cputrain.affinity.topology.machine import parse_list
from cputrain.affinity.wording import first_named, plural
from cputrain.checkpoint.folder import list_checkpoints
from cputrain.checksums import bit_sum, in_memory_order
from cputrain.comm.group import all_gather
from cputrain.data.formats.dataset import Images, is_too_damaged, refusal
from cputrain.files import CHECKPOINTS
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import DIVERGENCE_FACTOR
from cputrain.runs.trackers import Trackers
from cputrain.training.log import TrainingLog
from cputrain.training.saving import Position, load_newest, rename_damaged, restore
from cputrain.training.state import TrainState, own_buffers
from cputrain.training.step import Accuracy, EpochMetrics, StepResult, StepSettings, Watcher

READS, BEYOND_CACHES = 3, 64 << 20  # number of read times to keep, and bytes above which they measure memory, not cache
ROUNDING = 1e-4  # largest relative difference of a tensor, in its norm, that counts as rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerCheck(Watcher):
    """Warns of each experiment tracker that has failed, once."""

    trackers: Trackers
    warn: Callable[[int, str], None]

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Look whether the trackers' processes are running."""
        for failure in self.trackers.failures():
            self.warn(step, failure)


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
        self.hosts, found = zip(*all_gather((socket.gethostname(), arithmetic)), strict=True)
        self._alike = len(set(found)) == 1

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
        own = bit_sum(tensors.values())
        if sum(tensor.nbytes for tensor in tensors.values()) >= BEYOND_CACHES:
            self._reads_s.append(time.perf_counter() - begun)
        extremes = torch.tensor([own, ~own])  # one MAX all-reduce gives maximum and minimum, as ~x reverses the order
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        if int(extremes[0]) != ~int(extremes[1]):
            differing = odd_ranks(all_gather(own))
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
    return [rank for rank, own in enumerate(sums) if own != common]


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


STEAL = 7  # field of a line in /proc/stat: user nice system idle iowait irq softirq steal guest guest_nice
WAITING = (3, 4)  # fields idle and iowait


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreUse:
    """Use of a rank's PUs. `steal` and `others` are shares (0 to 1) of their CPU time, taken by the hypervisor and by
    other processes, including those on SMT siblings. `mhz` is the mean clock, 0 if unknown; `faults_per_s` are major
    page faults a second. `left` is the number of PUs that the rank's threads have lost or gained since the start.
    """

    steal: float
    others: float
    mhz: float
    faults_per_s: float
    left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counters:
    at: float
    busy_s: float
    steal_s: float
    own_s: float
    faults: int


class CoreUsage:
    """Measures the use of PUs by this process and by others since `restart`."""

    def __init__(self, pus: Collection[int], root: Path = Path("/")) -> None:
        self._root, self._pus = root, sorted(pus)
        self._siblings = {sibling for pu in pus for sibling in self._threads_of_core(pu)}
        self._bound = _bound_threads()
        self.restart()

    def restart(self) -> None:
        """Start to count from now."""
        self._before = self._read()

    def since_restart(self) -> CoreUse:
        """Return the use since the last restart."""
        before, now = self._before, self._read()
        seconds = max(now.at - before.at, 1e-9)
        pus_s = len(self._pus) * seconds
        others_s = (now.busy_s - before.busy_s) - (now.own_s - before.own_s)
        return CoreUse(
            steal=max(0.0, now.steal_s - before.steal_s) / pus_s,
            others=max(0.0, others_s) / pus_s,
            mhz=self._mhz(),
            faults_per_s=(now.faults - before.faults) / seconds,
            left=float(len(pus_left(self._bound, _bound_threads(), self._pus))),
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
            busy += sum(ticks[:STEAL]) - sum(ticks[i] for i in WAITING)  # user includes guest
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


def _bound_threads() -> dict[int, tuple[int, ...]]:
    return {thread.tid: thread.pus for thread in threads_of(os.getpid())}


def pus_left(
    before: Mapping[int, tuple[int, ...]], now: Mapping[int, tuple[int, ...]], planned: Collection[int]
) -> set[int]:
    """Return the PUs by which a process has left the planned ones: PUs of which a living thread had one before and that
    no thread may use now, and others that none could use before. `before` and `now` map threads to their PUs."""
    here = {pu for pus in now.values() for pu in pus}
    lost = {pu for tid, pus in before.items() if tid in now for pu in pus} - here
    return (lost & {*planned}) | (here - {*planned} - {pu for pus in before.values() for pu in pus})


EVERY_STEPS = 50
LEAST_S = 2.0  # seconds of steps to compare, because the kernel counts CPU time in hundredths of a second
SLOWER = 1.15  # step time relative to the median rank's, from which on a rank is slow
# A cause must differ from the median rank's value by more than these:
SHARE = 0.03  # share of the CPU time of a rank's PUs, difference
FAULTS_PER_S = 50.0  # difference
CLOCK, READING = 0.93, 1.15  # ratio


class StepStats(NamedTuple):
    """Speed of a rank's last steps. `step_s` is the median time of a step without waiting for other ranks,
    `data_wait_s` the median wait for images in it, `total_s` the sum over the steps; `read_s` is the time to read the
    rank's weights, 0 if unknown. For `steal` to `faults_per_s`, and `left`, see CoreUse.
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
    left: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A slow rank: its step time relative to the median rank's, and the likely cause as a keyword and in words."""

    rank: int
    factor: float
    kind: str
    cause: str


@dataclass(slots=True, kw_only=True)
class StragglerWatch(Watcher):
    """Compares the step times of all ranks and warns about stragglers, on rank 0. Each pair of rank and cause is
    reported once; one that ends and comes back, only after twice as many comparisons. `read_s` returns
    StepStats.read_s."""

    hosts: Sequence[str]
    warn: Callable[..., None]
    pus: Sequence[int]
    read_s: Callable[[], float]
    usage: CoreUsage = field(init=False)
    _steps: list[tuple[float, float]] = field(default_factory=list)
    _due: int = EVERY_STEPS
    _comparisons: int = 0
    _slow: frozenset[tuple[int, str]] = frozenset()
    _reported: dict[tuple[int, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.usage = CoreUsage(self.pus)

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Record a step of this rank, and compare the ranks if a comparison is due."""
        self._steps.append((seconds - result.comm_wait_s, result.data_wait_s))
        if len(self.hosts) > 1 and step % EVERY_STEPS == 0 and len(self._steps) >= self._due:
            self._compare(step)

    def _compare(self, step: int) -> None:
        paces = [StepStats(*row) for row in every_rank(self._pace()).tolist()]
        shortest_s = min(pace.total_s for pace in paces)
        self._due = max(EVERY_STEPS, ceil(len(self._steps) * LEAST_S / max(shortest_s, 1e-3)))  # the same on all ranks
        if shortest_s < LEAST_S:
            return  # too short to measure; the next comparison includes these steps
        self._steps.clear()
        self.usage.restart()
        self._comparisons += 1
        found = find_stragglers(paces)
        for one in to_report(found, slow=self._slow, reported=self._reported, comparison=self._comparisons):
            self._reported[one.rank, one.kind] = self._comparisons
            host, factor, cause = self.hosts[one.rank], one.factor, one.cause
            what = f"rank {one.rank} on {host} takes {factor:.2f} times as long per step as the median rank: {cause}"
            if factor <= SLOWER:
                what = f"rank {one.rank} on {host} {cause.removeprefix('it ')}"
            self.warn(step, what, rank=one.rank, host=host, factor=factor, cause=cause)
        self._slow = frozenset((one.rank, one.kind) for one in found)

    def _pace(self) -> StepStats:
        return StepStats(
            step_s=median(step_s for step_s, _ in self._steps),
            data_wait_s=median(wait_s for _, wait_s in self._steps),
            total_s=sum(step_s for step_s, _ in self._steps),
            read_s=self.read_s(),
            threads=torch.get_num_threads(),
            **asdict(self.usage.since_restart()),
        )


def every_rank(values: Sequence[float]) -> Tensor:
    """Return each rank's n values, shape (ranks, n), float64, by one all-reduce of rows that are zero elsewhere."""
    rows = torch.zeros(dist.get_world_size(), len(values), dtype=torch.float64)
    rows[dist.get_rank()] = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(rows)
    return rows


def find_stragglers(paces: Sequence[StepStats]) -> list[Straggler]:
    """Return the ranks whose steps take over 15 % longer than the median rank's (of two ranks, the faster one's), and
    those that have left their CPUs, where they slow others."""
    typical = sorted(paces, key=lambda pace: pace.step_s)[(len(paces) - 1) // 2]
    found = []
    for rank, pace in enumerate(paces):
        if pace.left or pace.step_s > SLOWER * typical.step_s:
            kind, cause = likely_cause(pace, typical)
            found.append(Straggler(rank=rank, factor=pace.step_s / typical.step_s, kind=kind, cause=cause))
    return found


def to_report(
    found: Sequence[Straggler],
    *,
    slow: Collection[tuple[int, str]],
    reported: Mapping[tuple[int, str], int],
    comparison: int,
) -> list[Straggler]:
    """Return the stragglers to report. (rank, kind) pairs that were `slow` in the previous comparison are not repeated;
    intermittent ones only when the comparison number has doubled since the one in `reported`, to limit the warnings."""
    return [
        one
        for one in found
        if (one.rank, one.kind) not in slow and comparison >= 2 * reported.get((one.rank, one.kind), 0)
    ]


def likely_cause(pace: StepStats, typical: StepStats) -> tuple[str, str]:
    """Return the likely cause why a rank is slower than a typical one, as a keyword and as a text for the warning."""
    lost_s = pace.step_s - typical.step_s
    if pace.left:  # first, as the counters below are those of the planned CPUs
        return "left", "it has left its CPUs, as its cpuset or affinity was changed: give them back, or start again"
    if pace.data_wait_s - typical.data_wait_s > lost_s / 2:
        waits = f"{pace.data_wait_s:.3g} s per step (the median rank {typical.data_wait_s:.3g} s)"
        return "loader", f"it waits {waits} for images, because its disk or its loader cores are slow"
    if pace.steal - typical.steal > SHARE:
        return "steal", f"the hypervisor takes {pace.steal:.0%} of the CPU time of its cores (steal)"
    if pace.others - typical.others > SHARE:
        return "others", f"other processes use {pace.others:.0%} of the CPU time of its cores"
    if pace.faults_per_s - typical.faults_per_s > FAULTS_PER_S:
        return "memory", f"its host is short of memory and reads {pace.faults_per_s:.0f} pages a second from disk"
    if pace.mhz and pace.mhz < CLOCK * typical.mhz:
        return "clock", f"its cores run at {pace.mhz:,.0f} MHz, the median rank's at {typical.mhz:,.0f} MHz"
    if pace.threads < typical.threads:
        threads = f"it has {plural(round(pace.threads), 'thread')}, the median rank {typical.threads:.0f}"
        return "threads", f"{threads} (set plan.balance=batch)"
    if typical.read_s and pace.read_s > READING * typical.read_s:
        times = pace.read_s / typical.read_s
        return "bandwidth", f"its memory is slow, reading its weights takes {times:.1f} times as long"
    return "unknown", "its host's counters show no cause, compare it with another host (cputrain bench model)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageCheck:
    """Ends the training on all ranks if too many images are damaged.

    `share` is data.max_damaged; `wait` waits for the pending checkpoint.
    """

    splits: Mapping[str, Images]
    share: float
    wait: Callable[[], None]

    def epoch(self, own: EpochMetrics, *, damaged: float, readable: float, ended: bool) -> None:
        """Check an epoch so far, given this rank's metrics and the sums over all ranks. Raises InputError if too many
        images are damaged, or if the epoch has `ended` without a readable image."""
        self._check("train", own.damaged, damaged, readable, ended=ended)

    def evaluation(self, split: str, accuracy: Accuracy) -> None:
        """Check a complete evaluation of a split. Raises InputError if too many images are damaged."""
        damaged = len(self.splits[split]) - accuracy.images
        self._check(split, accuracy.damaged, damaged, accuracy.images, ended=True)

    def _check(self, split: str, own: Sequence[str], damaged: float, readable: float, *, ended: bool) -> None:
        images = len(self.splits[split])
        if is_too_damaged(damaged, images, self.share) or (ended and damaged and not readable):
            lines = sorted(line for of_rank in all_gather(own) for line in of_rank)
            self.wait()
            raise refusal(split, lines, int(damaged + readable), images, self.share)


INTERVAL_S, PER_RANK_S = 10.0, 0.1  # shortest interval between records, so that events.jsonl grows by <= 300 bytes/s
MOST_STEPS, SECOND_STEPS = 100_000, 100  # largest intervals in steps; the second one, as the first step is often slow


@dataclass(slots=True, kw_only=True)
class RankTimes(Watcher):
    """Logs each rank's mean step time, communication wait and data wait since the last record.

    The same all-reduce sums the damaged images of the current epoch, which `damage` checks. `set_pace` is called with
    the slowest rank's mean step time, except after the first step, which is slow.

    All ranks take part in a record after the same step: the first step, then after as many steps as the slowest rank
    runs in the interval, which all ranks compute from the same values.
    """

    log: TrainingLog
    position: Position
    damage: DamageCheck
    set_pace: Callable[[float], None]
    steps: int = 0
    due: int = 1
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Record a step of this rank."""
        for i, value in enumerate((seconds, result.comm_wait_s, result.data_wait_s)):
            self.sums[i] += value
        self.steps += 1
        if self.steps >= self.due:
            self.after_last_step(step)

    def after_last_step(self, step: int) -> None:
        """Log every rank's mean times since the last record, if there were steps.

        Raises InputError if too many images are damaged.
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


MAX_ROLLBACKS = 3  # to the same checkpoint


@dataclass(slots=True, kw_only=True)
class NonFiniteHandler(Watcher):
    """Handles steps whose gradients contain NaN or Inf, as on_nan requests; `wait` waits for the pending checkpoint."""

    recipe: Recipe
    rank: int
    state: TrainState
    warn: Callable[[int, str], None]
    position: Position
    wait: Callable[[], None]

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """If the gradients are not finite, skip the step or restore the newest checkpoint; else raise RunError on the
        rank where NaN or Inf arose. Messages count steps from 0, like the schedule."""
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
        found = load_newest(folder, self.rank) if self.recipe.on_nan == "rollback" else None
        if found and rollbacks.get(found.path.name, 0) < MAX_ROLLBACKS:
            rename_damaged(found, self.warn, step, self.rank)
            restore(found, self.state, self.recipe.optim.name)
            rollbacks[found.path.name] = rollbacks.get(found.path.name, 0) + 1
            self.warn(step, f"{message}: restored {found.path.name}, training continues with the next images")
            return
        if self.rank == origin:
            saved = list_checkpoints(folder)
            kept = f"; checkpoint {saved[-1]} is kept" if saved else ""
            raise RunError(f"{message}: lower schedule.peak_rate, or set on_nan to skip or rollback{kept}")
        dist.barrier()  # the rank that raises exits, which ends this wait


def _describe(results: list[tuple[float, str]], step: int, lr: float) -> tuple[str, int]:
    """Return a line about the first rank whose outputs contain NaN or Inf, else about the gradients, and the rank."""
    first = next((rank for rank, (_, non_finite) in enumerate(results) if non_finite), 0)
    loss, non_finite = results[first]
    where = non_finite or "NaN or Inf in the gradients only"
    return f"rank {first}: loss {loss:g} at step {step}, {where}, learning rate {lr:g}", first


@dataclass(slots=True, kw_only=True)
class DivergenceCheck(Watcher):
    """Warns once if the loss diverges, which shows a too high learning rate long before NaN appears."""

    warn: Callable[[int, str], None]
    position: Position

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Compare the loss with the first step's."""
        loss, first = result.loss, self.position.first_loss
        if first is None:
            self.position.first_loss = loss if math.isfinite(loss) else None
        elif loss > DIVERGENCE_FACTOR * first > 0 and not self.position.diverged:  # a user's loss may be negative
            self.position.diverged = True
            self.warn(
                step,
                f"the loss is {loss:.3g} at step {step}, {loss / first:.0f} times the loss of the first step, "
                f"learning rate {settings.lr:g}: lower schedule.peak_rate, or lengthen the warm-up",
            )
