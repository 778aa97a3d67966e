"""Find slow ranks and the likely cause of each."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from statistics import median
from typing import NamedTuple

import torch

from cputrain.affinity.wording import plural
from cputrain.training.core_usage import CoreUsage
from cputrain.training.step import StepResult, StepSettings
from cputrain.training.watchers.base import Watcher, every_rank

EVERY_STEPS = 50
MIN_S = 2.0  # seconds of steps to compare, because the kernel counts CPU time in hundredths of a second
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
        of_ranks = [StepStats(*row) for row in every_rank(self._stats()).tolist()]
        shortest_s = min(stats.total_s for stats in of_ranks)
        self._due = max(EVERY_STEPS, ceil(len(self._steps) * MIN_S / max(shortest_s, 1e-3)))  # the same on all ranks
        if shortest_s < MIN_S:
            return  # too short to measure; the next comparison includes these steps
        self._steps.clear()
        self.usage.restart()
        self._comparisons += 1
        stragglers = find_stragglers(of_ranks)
        for straggler in to_report(stragglers, slow=self._slow, reported=self._reported, comparison=self._comparisons):
            self._reported[straggler.rank, straggler.kind] = self._comparisons
            rank, factor, cause = straggler.rank, straggler.factor, straggler.cause
            host = self.hosts[rank]
            what = f"rank {rank} on {host} takes {factor:.2f} times as long per step as the median rank: {cause}"
            if factor <= SLOWER:
                what = f"rank {rank} on {host} {cause.removeprefix('it ')}"
            self.warn(step, what, rank=rank, host=host, factor=factor, cause=cause)
        self._slow = frozenset((each.rank, each.kind) for each in stragglers)

    def _stats(self) -> StepStats:
        return StepStats(
            step_s=median(step_s for step_s, _ in self._steps),
            data_wait_s=median(wait_s for _, wait_s in self._steps),
            total_s=sum(step_s for step_s, _ in self._steps),
            read_s=self.read_s(),
            threads=torch.get_num_threads(),
            **asdict(self.usage.since_restart()),
        )


def find_stragglers(of_ranks: Sequence[StepStats]) -> list[Straggler]:
    """Return the ranks whose steps take over 15 % longer than the median rank's (of two ranks, the faster one's), and
    those that have left their CPUs, where they slow others."""
    typical = sorted(of_ranks, key=lambda stats: stats.step_s)[(len(of_ranks) - 1) // 2]
    stragglers = []
    for rank, stats in enumerate(of_ranks):
        if stats.left or stats.step_s > SLOWER * typical.step_s:
            kind, cause = likely_cause(stats, typical)
            stragglers.append(Straggler(rank=rank, factor=stats.step_s / typical.step_s, kind=kind, cause=cause))
    return stragglers


def to_report(
    stragglers: Sequence[Straggler],
    *,
    slow: Collection[tuple[int, str]],
    reported: Mapping[tuple[int, str], int],
    comparison: int,
) -> list[Straggler]:
    """Return the stragglers to report. (rank, kind) pairs that were `slow` in the previous comparison are not repeated;
    intermittent ones only when the comparison number has doubled since the one in `reported`, to limit the warnings."""
    return [
        straggler
        for straggler in stragglers
        if (straggler.rank, straggler.kind) not in slow
        and comparison >= 2 * reported.get((straggler.rank, straggler.kind), 0)
    ]


def likely_cause(stats: StepStats, typical: StepStats) -> tuple[str, str]:
    """Return the likely cause why a rank is slower than a typical one, as a keyword and as a text for the warning."""
    lost_s = stats.step_s - typical.step_s
    if stats.left:  # first, as the counters below are those of the planned CPUs
        return "left", "it has left its CPUs, as its cpuset or affinity was changed: give them back, or start again"
    if stats.data_wait_s - typical.data_wait_s > lost_s / 2:
        waits = f"{stats.data_wait_s:.3g} s per step (the median rank {typical.data_wait_s:.3g} s)"
        return "loader", f"it waits {waits} for images, because its disk or its loader cores are slow"
    if stats.steal - typical.steal > SHARE:
        return "steal", f"the hypervisor takes {stats.steal:.0%} of the CPU time of its cores (steal)"
    if stats.others - typical.others > SHARE:
        return "others", f"other processes use {stats.others:.0%} of the CPU time of its cores"
    if stats.faults_per_s - typical.faults_per_s > FAULTS_PER_S:
        return "memory", f"its host is short of memory and reads {stats.faults_per_s:.0f} pages a second from disk"
    if stats.mhz and stats.mhz < CLOCK * typical.mhz:
        return "clock", f"its cores run at {stats.mhz:,.0f} MHz, the median rank's at {typical.mhz:,.0f} MHz"
    if stats.threads < typical.threads:
        threads = f"it has {plural(round(stats.threads), 'thread')}, the median rank {typical.threads:.0f}"
        return "threads", f"{threads} (set plan.balance=batch)"
    if typical.read_s and stats.read_s > READING * typical.read_s:
        times = stats.read_s / typical.read_s
        return "bandwidth", f"its memory is slow, reading its weights takes {times:.1f} times as long"
    return "unknown", "its host's counters show no cause, compare it with another host (cputrain bench model)"
