"""More workers than cores: each has one core, which it shares with others."""

from dataclasses import replace

from affinity.planner.domains import Cut, Domain, shares
from affinity.topology.machine import Core, Machine


def cut_shared(machine: Machine, ppn: int) -> Cut:
    """Give each of ppn workers, more than the allowed cores, one core; the cores' numbers of workers differ by at most
    one. Workers of a core share out its PUs before two of them share a PU."""
    cores = machine.allowed_cores
    domains = tuple(
        Domain(cores=(part,))
        for core, workers in zip(cores, shares(tuple(range(ppn)), len(cores)), strict=True)
        for part in _parts(core, len(workers))
    )
    return Cut(
        domains=domains,
        left=(),
        why_count=f"asked for, more than the {len(cores)} cores (oversubscribe)",
        notes=(),
        warnings=(
            f"oversubscribed: {ppn} workers share {len(cores)} core(s), up to {-(-ppn // len(cores))} a core, and take "
            "turns: this tries out so many workers, it does not measure their speed",
        ),
    )


def _parts(core: Core, count: int) -> list[Core]:
    """The core once for each of its workers, cut down to the PUs of that worker."""
    pus = core.pus
    starts = [i * len(pus) // count for i in range(count)]
    ends = [max(start + 1, (i + 1) * len(pus) // count) for i, start in enumerate(starts)]
    return [replace(core, pus=pus[start:end]) for start, end in zip(starts, ends, strict=True)]
