"""What is to be reproduced, as data: which trainings decide it, and what they say."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from cputrain.sweep import SEED, Result, Variant, spread

HOLDS, LOST = 1.0, 3.0  # points of top-1 under the baseline: LARS at most, momentum more


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One optimizer at one global batch: its rate that did best with the first seed, and all seeds' results at it.

    `tried` are the results of all its rates with the first seed.
    """

    batch: int
    optimizer: str
    tried: tuple[Result, ...]
    results: tuple[Result, ...] = ()

    @property
    def best(self) -> Result:
        """Of those tried; one that diverged is worse than any that did not."""
        return max(self.tried, key=lambda result: -1.0 if result.top1 is None else result.top1)

    @property
    def rate(self) -> str:
        """The rate that did best."""
        return dict(self.best.settings)["schedule.peak_rate"]

    @property
    def top1s(self) -> tuple[float, ...]:
        """Final top-1 in percent of the seeds that ended well."""
        return tuple(result.top1 for result in self.results if result.top1 is not None)


def cells(tried: Iterable[tuple[int, Result]]) -> tuple[Cell, ...]:
    """Results of the first seed with their global batches -> one cell an optimizer and batch, small batches first."""
    by_place: dict[tuple[int, str], list[Result]] = {}
    for batch, result in tried:
        by_place.setdefault((batch, dict(result.settings)["optim.name"]), []).append(result)
    order = sorted(by_place, key=lambda place: place[0])
    return tuple(Cell(batch=b, optimizer=o, tried=tuple(by_place[b, o])) for b, o in order)


def with_seed(settings: tuple[tuple[str, str], ...], seed: int) -> Variant:
    """The same training from another beginning."""
    return Variant(settings=(*((key, value) for key, value in settings if key != SEED), (SEED, str(seed))))


def filled(cell: Cell, others: Sequence[Result]) -> Cell:
    """The cell with the results of the other seeds at its best rate."""
    return replace(cell, results=(cell.best, *others))


def large_batch_table(found: Sequence[Cell]) -> list[tuple[str, ...]]:
    """Head and rows: batch, its multiple of the smallest, optimizer, rate, top-1, points from the baseline, others."""
    base = found[0]
    rows: list[tuple[str, ...]] = [
        ("global batch", "x", "optimizer", "rate", "top-1 %", "points", "others, first seed")
    ]
    for cell in found:
        lost = f"{mean(cell.top1s) - mean(base.top1s):+.2f}" if cell.top1s and cell is not base else ""
        others = ", ".join(_told(result) for result in cell.tried if result is not cell.best)
        top1 = spread(cell.top1s) or "diverged"
        rows.append((f"{cell.batch:,}", f"{cell.batch // base.batch}", cell.optimizer, cell.rate, top1, lost, others))
    return rows


def _told(result: Result) -> str:
    top1 = "diverged" if result.top1 is None else f"{result.top1:.2f}"
    return f"{dict(result.settings)['schedule.peak_rate']}: {top1}"


def large_batch_verdict(found: Sequence[Cell]) -> str:
    """The largest batch at which LARS holds the baseline's accuracy and tuned momentum does not, if there is one."""
    base = mean(found[0].top1s)
    lost = {(cell.batch, cell.optimizer): base - mean(cell.top1s) if cell.top1s else base for cell in found}
    batches = sorted({cell.batch for cell in found[1:]})
    for batch in reversed(batches):
        lars, momentum = lost[batch, "lars"], lost[batch, "momentum"]
        if lars <= HOLDS and momentum > LOST:
            where = "under" if lars >= 0 else "over"
            return (
                f"holds: at {batch:,} LARS is {abs(lars):.2f} points {where} the baseline of {base:.2f} %, "
                f"momentum at its best rate {momentum:.2f} under"
            )
    told = "; ".join(f"{b:,}: LARS {-lost[b, 'lars']:+.2f}, momentum {-lost[b, 'momentum']:+.2f}" for b in batches)
    return f"does not hold here (LARS within {HOLDS:g} point where momentum loses more than {LOST:g}): {told}"
