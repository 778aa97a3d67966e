"""The large-batch claim: the trainings that decide it, their table and the verdict."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from affinity.errors import InputError
from cputrain.sweep import SEED, RunResult, Variant, finished_top1s, spread

HOLDS, LOSES = 1.0, 3.0  # points of top-1 below the baseline: at most for LARS, more than for momentum


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResults:
    """One optimizer at one global batch.

    `tried` are the results of all learning rates with the first seed, `results` those of all seeds at the best rate.
    """

    batch: int
    optimizer: str
    tried: tuple[RunResult, ...]
    results: tuple[RunResult, ...] = ()

    @property
    def best(self) -> RunResult:
        """The best result of the first seed; a diverged training is worse than any other."""
        return max(self.tried, key=lambda result: -1.0 if result.top1 is None else result.top1)

    @property
    def rate(self) -> str:
        """The learning rate of the best result."""
        return dict(self.best.settings)["schedule.peak_rate"]

    @property
    def top1s(self) -> tuple[float, ...]:
        """Final top-1 in percent of the seeds that finished."""
        return finished_top1s(self.results)


def check_study(trainings: Iterable[tuple[int, str]]) -> None:
    """(global batch, optimizer) of all trainings: raises InputError where they cannot decide the claim, which takes a
    baseline at the smallest batch, and momentum and LARS at each larger one."""
    optimizers: dict[int, set[str]] = {}
    for batch, optimizer in trainings:
        optimizers.setdefault(batch, set()).add(optimizer)
    larger = sorted(optimizers)[1:]
    incomplete = [batch for batch in larger if optimizers[batch] != {"lars", "momentum"}]
    if not larger or incomplete or len(optimizers[min(optimizers)]) > 1:
        found = "; ".join(f"{batch:,}: {', '.join(sorted(optimizers[batch]))}" for batch in sorted(optimizers))
        raise InputError(
            "the study compares momentum with lars at each batch above the smallest, which has one optimizer; "
            f"sweep.runs has {found}"
        )


def by_batch(tried: Iterable[tuple[int, RunResult]]) -> tuple[BatchResults, ...]:
    """(global batch, result of the first seed) pairs -> one entry for each optimizer and batch, small batches first."""
    by_place: dict[tuple[int, str], list[RunResult]] = {}
    for batch, result in tried:
        by_place.setdefault((batch, dict(result.settings)["optim.name"]), []).append(result)
    order = sorted(by_place, key=lambda place: place[0])
    return tuple(BatchResults(batch=b, optimizer=o, tried=tuple(by_place[b, o])) for b, o in order)


def with_seed(settings: tuple[tuple[str, str], ...], seed: int) -> Variant:
    """The same training with another random seed."""
    return Variant(settings=(*((key, value) for key, value in settings if key != SEED), (SEED, str(seed))))


def with_all_seeds(entry: BatchResults, others: Sequence[RunResult]) -> BatchResults:
    """The entry with the results of the other seeds at its best rate."""
    return replace(entry, results=(entry.best, *others))


def large_batch_table(found: Sequence[BatchResults]) -> list[tuple[str, ...]]:
    """Headings and rows: batch, its multiple of the smallest, optimizer, rate, top-1, points, other rates."""
    base = found[0]
    rows: list[tuple[str, ...]] = [
        ("global batch", "x", "optimizer", "rate", "top-1 %", "points", "other rates, first seed")
    ]
    for entry in found:
        points = f"{mean(entry.top1s) - mean(base.top1s):+.2f}" if entry.top1s and entry is not base else ""
        others = ", ".join(_rate_and_top1(result) for result in entry.tried if result is not entry.best)
        top1 = spread(entry.top1s) or "diverged"
        rows.append(
            (f"{entry.batch:,}", f"{entry.batch // base.batch}", entry.optimizer, entry.rate, top1, points, others)
        )
    return rows


def _rate_and_top1(result: RunResult) -> str:
    top1 = "diverged" if result.top1 is None else f"{result.top1:.2f}"
    return f"{dict(result.settings)['schedule.peak_rate']}: {top1}"


def large_batch_verdict(found: Sequence[BatchResults]) -> str:
    """A sentence: the largest batch at which LARS keeps the baseline's accuracy and tuned momentum does not, if any."""
    base = mean(found[0].top1s)
    below = {(entry.batch, entry.optimizer): base - mean(entry.top1s) if entry.top1s else base for entry in found}
    batches = sorted({entry.batch for entry in found[1:]})
    for batch in reversed(batches):
        lars, momentum = below[batch, "lars"], below[batch, "momentum"]
        if lars <= HOLDS and momentum > LOSES:
            where = "below" if lars >= 0 else "above"
            return (
                f"holds: at {batch:,} LARS is {abs(lars):.2f} points {where} the baseline of {base:.2f} %, "
                f"momentum at its best rate {momentum:.2f} below"
            )
    figures = "; ".join(f"{b:,}: LARS {-below[b, 'lars']:+.2f}, momentum {-below[b, 'momentum']:+.2f}" for b in batches)
    return f"does not hold here (LARS within {HOLDS:g} point where momentum loses more than {LOSES:g}): {figures}"
