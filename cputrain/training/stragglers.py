"""Ranks that are slower than the others, who wait for them in every step: found every 50 steps, and the cause."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from cputrain.training.core_usage import CoreUsage
from cputrain.training.log import TrainingLog
from cputrain.training.metrics import StepResult

EVERY_STEPS = 50
LEAST_S = 2.0  # of steps: the kernel counts CPU time in hundredths of a second
SLOWER = 1.15
SHARE = 0.03  # of the CPU time of a rank's PUs, beyond the typical rank's
FAULTS_PER_S = 50.0
CLOCK, READING = 0.93, 1.15  # of the typical rank's


class Pace(NamedTuple):
    """A rank's last steps. `step_s` is the median time of a step without waiting for other ranks, `data_wait_s` the
    part of it that was waiting for images, `total_s` the seconds of these steps.

    Of the CPU time of the cores of its PUs, `steal` is the hypervisor's share and `others` that of other processes;
    `mhz` is their clock, 0 if unknown, `faults_per_s` the page faults that needed a disk, `read_s` the time of reading
    its weights, 0 if unknown.
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
class StragglerWatch:
    """Measures this rank's pace on its `pus` and compares it with the others'; a rank is named once, until it or its
    cause changes, and then after twice as many comparisons. To be used alike by all ranks; rank 0 reports."""

    hosts: Sequence[str]
    log: TrainingLog
    pus: Sequence[int]
    usage: CoreUsage = field(init=False)
    _steps: list[tuple[float, float]] = field(default_factory=list)
    _due: int = EVERY_STEPS
    _comparisons: int = 0
    _slow: frozenset[tuple[int, str]] = frozenset()
    _named: dict[tuple[int, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.usage = CoreUsage(self.pus)

    def add(self, result: StepResult, seconds: float, step: int, read_s: float) -> None:
        """Add a step of this rank, and compare the ranks where that is due; `read_s` as in `Pace`."""
        self._steps.append((seconds - result.comm_wait_s, result.data_wait_s))
        if len(self.hosts) > 1 and step % EVERY_STEPS == 0 and len(self._steps) >= self._due:
            self._compare(step, read_s)

    def _compare(self, step: int, read_s: float) -> None:
        paces = gathered(self._pace(read_s))
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
            self.log.warn_of_straggler(step, one.rank, self.hosts[one.rank], one.factor, one.cause)
        self._slow = frozenset((one.rank, one.kind) for one in found)

    def _pace(self, read_s: float) -> Pace:
        used = self.usage.since_restart()
        return Pace(
            step_s=median(step_s for step_s, _ in self._steps),
            data_wait_s=median(wait_s for _, wait_s in self._steps),
            total_s=sum(step_s for step_s, _ in self._steps),
            steal=used.steal,
            others=used.others,
            mhz=used.mhz,
            faults_per_s=used.faults_per_s,
            read_s=read_s,
            threads=torch.get_num_threads(),
        )


def gathered(own: Pace) -> list[Pace]:
    """Every rank's pace, in one small exchange: each adds its row to zeros."""
    paces = torch.zeros(dist.get_world_size(), len(own), dtype=torch.float64)
    paces[dist.get_rank()] = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(paces)
    return [Pace(*row) for row in paces.tolist()]


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
