"""More workers than cores: each has one core, which it shares with others."""

from dataclasses import replace

from affinity.planner.domains import Domain, Partition
from affinity.planner.layouts import shares
from affinity.planner.reasons import SET, Reason
from affinity.topology.machine import Core, Machine
from affinity.wording import counted


def partition_shared(machine: Machine, ppn: int) -> Partition:
    """Give each of ppn workers, more than the allowed cores, one core; the cores' numbers of workers differ by at most
    one. Workers of a core divide its PUs before two of them share a PU."""
    cores = machine.allowed_cores
    domains = tuple(
        Domain(cores=(part,))
        for core, workers in zip(cores, shares(tuple(range(ppn)), len(cores)), strict=True)
        for part in _parts(core, len(workers))
    )
    most = -(-ppn // len(cores))
    why = f"{SET}, more than the {counted(len(cores), 'core')} ({{oversubscribe=true}})"
    return Partition(
        domains=domains,
        unused=(),
        reasons=(Reason(what="workers per host", value=str(ppn), why=why),),
        warnings=(
            f"oversubscribed: {ppn} workers share {counted(len(cores), 'core')}, up to {most} per core, and "
            "slow each other down: use this to test a number of workers, not to measure speed",
        ),
    )


def _parts(core: Core, count: int) -> list[Core]:
    """The core once for each of its workers, with the PUs of that worker only."""
    pus = core.pus
    starts = [i * len(pus) // count for i in range(count)]
    ends = [max(start + 1, (i + 1) * len(pus) // count) for i, start in enumerate(starts)]
    return [replace(core, pus=pus[start:end]) for start, end in zip(starts, ends, strict=True)]
