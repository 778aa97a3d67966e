"""The large-batch study: accuracy by global batch, with and without LARS."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.wording import counted
from cputrain.files import write_text
from cputrain.launch.local import PlannedTraining, plan_training
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import SweepSection
from cputrain.rows import Column, Rows, figure
from cputrain.sweep.output import write_results
from cputrain.sweep.results import SEED, RunResult, Variant, finished_top1s, variants
from cputrain.sweep.run import train_all
from cputrain.sweep.tables import spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def large_batch_table(found: Sequence[BatchResults]) -> Rows:
    """A row for each optimizer and batch: its multiple of the smallest batch, rate, top-1, points, other rates."""
    base = found[0]

    def points(entry: BatchResults) -> float | None:
        return mean(entry.top1s) - mean(base.top1s) if entry.top1s and entry is not base else None

    columns = (
        Column("global batch", "batch", ","),
        Column("x", lambda entry: entry.batch // base.batch),
        Column("optimizer", "optimizer"),
        Column("rate", "rate"),
        Column("top-1 %", lambda entry: spread(entry.top1s) or "diverged"),
        Column("points", points, "+.2f"),
        Column(
            "other rates, first seed",
            lambda entry: ", ".join(_rate_and_top1(result) for result in entry.tried if result is not entry.best),
        ),
    )
    return Rows(columns, found)


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


MARKS = {"momentum": ("o", "momentum, best rate"), "lars": ("s", "LARS, best rate")}


def large_batch_chart(title: str, found: Sequence[BatchResults]) -> str:
    """SVG: top-1 of each optimizer over the global batch, mean and range of the seeds, and the baseline."""

    def draw(axes: "Axes") -> None:
        base = mean(found[0].top1s)
        for below, style in ((0.0, "-"), (HOLDS, "--"), (LOSES, ":")):
            label = (
                f"baseline {base:.2f} %" if below == 0 else f"{below:g} {'point' if below == 1 else 'points'} below it"
            )
            axes.axhline(base - below, color="gray", linewidth=0.8, linestyle=style, label=label)
        for optimizer, (mark, name) in MARKS.items():
            finished = [entry for entry in found if entry.top1s and (entry.optimizer == optimizer or entry is found[0])]
            means = [mean(entry.top1s) for entry in finished]
            low = [m - min(entry.top1s) for m, entry in zip(means, finished, strict=True)]
            high = [max(entry.top1s) - m for m, entry in zip(means, finished, strict=True)]
            axes.errorbar([entry.batch for entry in finished], means, (low, high), marker=mark, capsize=3, label=name)
        axes.set_xscale("log", base=2)
        batches = sorted({entry.batch for entry in found})
        axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
        axes.legend(fontsize="small", loc="lower left")

    return figure(draw, (7, 4.5), xlabel="global batch, same number of epochs", ylabel="top-1, percent", title=title)


LARGE_BATCH_PICTURE = "large-batch.svg"


def run_large_batch(
    scale: str,
    settings: tuple[str, ...],
    seeds: int,
    folder: Path,
    env: Mapping[str, str],
    report: Callable[[str], None],
) -> list[BatchResults]:
    """Train the recipe large-batch-SCALE: every learning rate with the first seed, then the best rate of each optimizer
    and batch with the other seeds.

    `folder` gets the trainings, tables and PICTURE; what is finished there is not repeated. `report` shows a line to
    the user. Raises InputError, and RunError where the baseline does not finish.
    """
    name = f"large-batch-{scale}"

    def planned(variant: Variant) -> tuple[Variant, PlannedTraining]:
        recipe = load_recipe(name, (*settings, *variant.arguments, f"output={folder / variant.folder}"))
        return variant, plan_training(recipe.model_copy(update={"sweep": SweepSection()}), env)

    sweep = load_recipe(name, settings).sweep
    first = [planned(with_seed(variant.settings, 1)) for variant in variants(sweep, (), ())]
    check_study((one.sizes.global_batch, one.recipe.optim.name) for _, one in first)
    report(f"{len(first)} trainings with the first seed, then the best rates with {counted(seeds - 1, 'more seed')}")
    tried = train_all(first, env)
    found = by_batch((one.sizes.global_batch, result) for (_, one), result in zip(first, tried, strict=True))
    if not found[0].best.top1:
        raise RunError(f"the baseline with global batch {found[0].batch} did not finish: see its logs in {folder}")
    full = []
    for entry in found:
        finished = entry.best.top1 is not None
        others = [with_seed(entry.best.settings, seed) for seed in range(2, seeds + 1)] if finished else []
        full.append(with_all_seeds(entry, train_all([planned(variant) for variant in others], env)))
    write_results(folder, name, [result for entry in full for result in (*entry.tried, *entry.results[1:])])

    write_text(folder / LARGE_BATCH_PICTURE, large_batch_chart(name, full))
    return full
