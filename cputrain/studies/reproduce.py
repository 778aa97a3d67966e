"""Repeat published experiments: the large-batch study (accuracy by global batch, with and without LARS), and tables of
published settings next to those derived from the recipes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import isclose
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from pydantic import field_validator

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import read_yaml, shipped_folder
from cputrain.affinity.wording import plural
from cputrain.files import write_text
from cputrain.recipe.derivation import derive
from cputrain.recipe.loading import load_recipe, tuples
from cputrain.recipe.schema import PlanSection, Recipe, Section
from cputrain.rows import Column, Rows
from cputrain.settings import Positive
from cputrain.studies.svg import plot_svg
from cputrain.studies.sweep.results import spread_text, write_results
from cputrain.studies.sweep.trainings import SEED, RunResult, Variant, duration_text, train_all, variants
from cputrain.training.local import PlannedTraining, plan_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LARS_MAX_LOSS, MOMENTUM_MIN_LOSS = (
    1.0,
    3.0,
)  # points of top-1 below the baseline: LARS loses at most the first, momentum more than the second

MARKS = {"momentum": ("o", "momentum, best rate"), "lars": ("s", "LARS, best rate")}
LARGE_BATCH_PICTURE = "large-batch.svg"
DOCUMENTS = ("you-et-al", "surfsara-intel", "gist", "multi-worker-lab", "lab3")
FOLDER = shipped_folder("published")
TIME, SPEED = "time", "images/s"
IMPLIED = {SPEED: f"{SPEED}, from the time", TIME: f"{TIME}, from images/s"}

# Shown for every recipe, even if the document does not print them.
ALWAYS = ("global batch", "workers", "epochs", "steps per epoch", "warm-up steps", "total steps", "peak rate")
QUANTITIES = (
    *("global batch", "batch a worker", "workers", "images per epoch", "epochs", "steps per epoch", "warm-up steps"),
    *("total steps", "start rate", "peak rate", "weight decay", "batch-norm decay", "trust coefficient"),
    *("weight norm", "gradient norm", "ratio of norms", "training top-1 %", "top-1 %", "top-5 %", "test top-1 %"),
    *("accuracy %", "efficiency %", "seconds an epoch", SPEED, IMPLIED[SPEED], TIME, IMPLIED[TIME]),
)

COMPARED = (  # columns for pairs of an experiment and one of its rows
    Column("experiment", lambda pair: pair[0].experiment),
    Column("quantity", lambda pair: pair[1].quantity),
    Column("published", lambda pair: quantity_text(pair[1].quantity, pair[1].published)),
    Column("recipe", lambda pair: quantity_text(pair[1].quantity, pair[1].recipe)),
    Column("", lambda pair: "differs" if pair[1].differs else ""),
)
INDENTED = Column("", lambda pair: f"  {pair[1].quantity}")
RULES = ("---", "---", "---:", "---:", "---")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResults:
    """Results of one optimizer at one global batch.

    `tried` are the results of all learning rates with the first seed, `others` those of the other seeds with the best
    learning rate.
    """

    batch: int
    optimizer: str
    tried: tuple[RunResult, ...]
    others: tuple[RunResult, ...] = ()

    @property
    def best(self) -> RunResult:
        """The best result of the first seed; a diverged training ranks last."""
        return max(self.tried, key=lambda result: -1.0 if result.top1 is None else result.top1)

    @property
    def lr(self) -> str:
        """The learning rate of the best result."""
        return dict(self.best.settings)["schedule.peak_rate"]

    @property
    def top1s(self) -> tuple[float, ...]:
        """Final top-1 in percent, one value per seed that finished."""
        return tuple(result.top1 for result in (self.best, *self.others) if result.top1 is not None)


def check_study(trainings: Iterable[tuple[int, str]]) -> None:
    """Raise InputError if these (global batch, optimizer) pairs cannot decide the claim, which needs a baseline at the
    smallest batch, and momentum and LARS at each larger one."""
    optimizers: dict[int, set[str]] = {}
    for batch, optimizer in trainings:
        optimizers.setdefault(batch, set()).add(optimizer)
    larger = sorted(optimizers)[1:]
    incomplete = [batch for batch in larger if optimizers[batch] != {"lars", "momentum"}]
    if not larger or incomplete or len(optimizers[min(optimizers)]) > 1:
        batches = "; ".join(f"{batch:,}: {', '.join(sorted(optimizers[batch]))}" for batch in sorted(optimizers))
        raise InputError(
            "the study needs one optimizer at the smallest batch, and momentum and lars at each larger one; "
            f"sweep.runs has {batches}: correct it"
        )


def by_batch(tried: Iterable[tuple[int, RunResult]]) -> tuple[BatchResults, ...]:
    """Group (global batch, result of the first seed) pairs by optimizer and batch, small batches first."""
    by_place: dict[tuple[int, str], list[RunResult]] = {}
    for batch, result in tried:
        by_place.setdefault((batch, dict(result.settings)["optim.name"]), []).append(result)
    order = sorted(by_place, key=lambda setup: setup[0])
    return tuple(BatchResults(batch=b, optimizer=o, tried=tuple(by_place[b, o])) for b, o in order)


def with_seed(settings: tuple[tuple[str, str], ...], seed: int) -> Variant:
    """Return the same training with another random seed."""
    return Variant(settings=(*((key, value) for key, value in settings if key != SEED), (SEED, str(seed))))


def large_batch_table(results: Sequence[BatchResults]) -> Rows:
    """Tabulate each optimizer and batch: multiple of the smallest batch, learning rate, top-1, points, other rates."""
    base = results[0]

    def points(entry: BatchResults) -> float | None:
        return mean(entry.top1s) - mean(base.top1s) if entry.top1s and entry is not base else None

    def others(entry: BatchResults) -> str:
        lrs = ((dict(r.settings)["schedule.peak_rate"], r.top1) for r in entry.tried if r is not entry.best)
        return ", ".join(f"{lr}: {'diverged' if top1 is None else f'{top1:.2f}'}" for lr, top1 in lrs)

    columns = (
        Column("global batch", "batch", ","),
        Column("x", lambda entry: entry.batch // base.batch),
        Column("optimizer", "optimizer"),
        Column("rate", "lr"),
        Column("top-1 %", lambda entry: spread_text(entry.top1s) or "diverged"),
        Column("points", points, "+.2f"),
        Column("other rates, first seed", others),
    )
    return Rows(columns, results)


def large_batch_verdict(results: Sequence[BatchResults]) -> str:
    """Return a sentence with the largest batch, if any, at which LARS keeps the accuracy and momentum does not."""
    base = mean(results[0].top1s)
    below = {(entry.batch, entry.optimizer): base - mean(entry.top1s) if entry.top1s else base for entry in results}
    batches = sorted({entry.batch for entry in results[1:]})
    for batch in reversed(batches):
        lars, momentum = below[batch, "lars"], below[batch, "momentum"]
        if lars <= LARS_MAX_LOSS and momentum > MOMENTUM_MIN_LOSS:
            where = "below" if lars >= 0 else "above"
            return (
                f"holds: at {batch:,} LARS is {abs(lars):.2f} points {where} the baseline of {base:.2f} %, "
                f"momentum at its best rate {momentum:.2f} below"
            )
    figures = "; ".join(f"{b:,}: LARS {-below[b, 'lars']:+.2f}, momentum {-below[b, 'momentum']:+.2f}" for b in batches)
    claim = f"LARS within {LARS_MAX_LOSS:g} point at a batch at which momentum loses more than {MOMENTUM_MIN_LOSS:g}"
    return f"does not hold here ({claim}): {figures}"


def large_batch_chart(title: str, results: Sequence[BatchResults]) -> str:
    """Plot as SVG each optimizer's top-1 over the global batch, mean and range of the seeds, and the baseline."""

    def draw(axes: "Axes") -> None:
        base = mean(results[0].top1s)
        for below, style in ((0.0, "-"), (LARS_MAX_LOSS, "--"), (MOMENTUM_MIN_LOSS, ":")):
            label = (
                f"baseline {base:.2f} %" if below == 0 else f"{below:g} {'point' if below == 1 else 'points'} below it"
            )
            axes.axhline(base - below, color="gray", linewidth=0.8, linestyle=style, label=label)
        for optimizer, (mark, name) in MARKS.items():
            finished = [
                entry for entry in results if entry.top1s and (entry.optimizer == optimizer or entry is results[0])
            ]
            means = [mean(entry.top1s) for entry in finished]
            low = [m - min(entry.top1s) for m, entry in zip(means, finished, strict=True)]
            high = [max(entry.top1s) - m for m, entry in zip(means, finished, strict=True)]
            axes.errorbar([entry.batch for entry in finished], means, (low, high), marker=mark, capsize=3, label=name)
        axes.set_xscale("log", base=2)
        batches = sorted({entry.batch for entry in results})
        axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
        axes.legend(fontsize="small", loc="lower left")

    return plot_svg(draw, (7, 4.5), xlabel="global batch, same number of epochs", ylabel="top-1, percent", title=title)


def run_large_batch(
    scale: str,
    settings: tuple[str, ...],
    seeds: int,
    folder: Path,
    env: Mapping[str, str],
    report: Callable[[str], None],
) -> list[BatchResults]:
    """Train the recipe large-batch-SCALE: every learning rate with the first seed, then the best one of each optimizer
    and batch with the other seeds.

    `folder` gets the trainings, tables and LARGE_BATCH_PICTURE; finished trainings in it are not repeated. `report`
    prints a line. Raises InputError, and RunError if the baseline does not finish.
    """
    name = f"large-batch-{scale}"

    def planned(variant: Variant) -> tuple[Variant, PlannedTraining]:
        output = f"output={folder / variant.folder}"
        return variant, plan_named(name, (*settings, *variant.arguments, output), env)

    sweep = load_recipe(name, settings).sweep
    first = [planned(with_seed(variant.settings, 1)) for variant in variants(sweep, (), ())]
    check_study((training.sizes.global_batch, training.recipe.optim.name) for _, training in first)
    report(f"{len(first)} trainings with the first seed, then the best rates with {plural(seeds - 1, 'more seed')}")
    tried = train_all(first, env)
    results = by_batch(
        (training.sizes.global_batch, result) for (_, training), result in zip(first, tried, strict=True)
    )
    if not results[0].best.top1:
        raise RunError(f"the baseline with global batch {results[0].batch} did not finish; see its logs in {folder}")
    full = []
    for entry in results:
        finished = entry.best.top1 is not None
        others = [with_seed(entry.best.settings, seed) for seed in range(2, seeds + 1)] if finished else []
        full.append(replace(entry, others=tuple(train_all([planned(variant) for variant in others], env))))
    write_results(folder, name, [result for entry in full for result in (*entry.tried, *entry.others)])

    write_text(folder / LARGE_BATCH_PICTURE, large_batch_chart(name, full))
    return full


class Experiment(Section, frozen=True):
    """A row of a published table."""

    title: str
    published: dict[str, float]
    """The printed values by the names in QUANTITIES."""
    time: str | None = None
    """The published duration, hours:minutes:seconds."""
    timed: bool = True
    """Whether the published duration covers all images and epochs of the recipe."""
    recipe: str | None = None
    """Recipe of the same training, with settings; None: the table's recipe, if any."""
    settings: str = ""
    """More settings for the table's recipe."""
    hosts: Positive = 1
    note: str = ""
    """Why the recipe differs, or a remark on the printed values."""

    @field_validator("published")
    @classmethod
    def _known(cls, published: dict[str, float]) -> dict[str, float]:
        if unknown := set(published) - set(QUANTITIES):
            raise ValueError(f"no such quantity: {', '.join(sorted(unknown))}")
        return published


class PublishedTable(Section, frozen=True):
    """A table, figure or passage of a document, with the values that its experiments share."""

    title: str
    recipe: str | None = None
    note: str = ""
    timed: bool = True
    experiments: tuple[Experiment, ...]


class Document(Section, frozen=True):
    """The tables of a reference document."""

    document: str
    tables: tuple[PublishedTable, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityRow:
    """A quantity with its published value (printed, or implied by printed ones) and the recipe's; None if missing."""

    quantity: str
    published: float | None
    recipe: float | None
    differs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentComparison:
    """An experiment and its recipe; `command` is the recipe with settings, on `hosts` hosts with `ppn` workers each."""

    document: str
    table: str
    experiment: str
    command: str
    hosts: int
    ppn: int
    rows: tuple[QuantityRow, ...]
    note: str


def published_tables(documents: Sequence[str]) -> Iterator[ExperimentComparison]:
    """Yield every experiment of these documents, in their order."""
    for name in documents:
        read = tuples(read_yaml(FOLDER / f"{name}.yaml"))
        document = Document.model_validate(read)
        for table in document.tables:
            for experiment in table.experiments:
                yield _compared(document.document, table, experiment)


def _compared(document: str, table: PublishedTable, experiment: Experiment) -> ExperimentComparison:
    command = " ".join(filter(None, (experiment.recipe or table.recipe, experiment.settings)))
    name, *settings = command.split() or [""]
    recipe = load_recipe(name, settings) if name else None
    derived = _derived(recipe, experiment.hosts) if recipe else {}
    timed = table.timed and experiment.timed
    published = _with_implied(experiment, derived if timed else {})
    shown = {*published, *(ALWAYS if derived else ())}
    return ExperimentComparison(
        document=document,
        table=table.title,
        experiment=experiment.title,
        command=command,
        hosts=experiment.hosts,
        ppn=_ppn(recipe.plan) if recipe else 0,
        rows=tuple(_row(quantity, published, derived) for quantity in QUANTITIES if quantity in shown),
        note="; ".join(filter(None, (experiment.note, table.note))),
    )


def _row(quantity: str, published: dict[str, float], derived: dict[str, float]) -> QuantityRow:
    a, b = published.get(quantity), derived.get(quantity)
    differs = a is not None and b is not None and not isclose(a, b)  # not exact, as learning rates are products
    return QuantityRow(quantity=quantity, published=a, recipe=b, differs=differs)


def _with_implied(experiment: Experiment, derived: dict[str, float]) -> dict[str, float]:
    """Return the printed values with the time in seconds, and time or images/s if only the other one is printed.

    One is computed from the other with the recipe's images and epochs.
    """
    values = dict(experiment.published)
    if experiment.time:
        hours, minutes, seconds = experiment.time.split(":")
        values[TIME] = 3600 * int(hours) + 60 * int(minutes) + float(seconds)
    if derived:
        images = derived["epochs"] * derived["images per epoch"]
        if TIME in values and SPEED not in values:
            values[IMPLIED[SPEED]] = round(images / values[TIME])
        elif SPEED in values and TIME not in values:
            values[IMPLIED[TIME]] = round(images / values[SPEED])
    return values


def _ppn(plan: PlanSection) -> int:
    """Return the workers per host; every recipe of a published experiment sets them."""
    assert plan.ppn != "auto"
    return int(plan.ppn)


def _derived(recipe: Recipe, hosts: int) -> dict[str, float]:
    """Return a recipe's sizes on `hosts` hosts, by quantity."""
    data, ppn = recipe.data, _ppn(recipe.plan)
    sizes = derive(recipe, ppn=ppn, nodes=hosts, images=data.train_images or 0)
    values: dict[str, float] = {
        "global batch": sizes.global_batch,
        "batch a worker": sizes.global_batch / (ppn * hosts),
        "workers": ppn * hosts,
        "images per epoch": sizes.images_per_epoch,
        "epochs": recipe.epochs,
        "steps per epoch": sizes.steps_per_epoch,
        "warm-up steps": sizes.warmup_steps,
        "total steps": sizes.total_steps,
        "start rate": recipe.schedule.start_rate if sizes.warmup_steps else sizes.peak_rate,
        "peak rate": sizes.peak_rate,
        "weight decay": recipe.optim.weight_decay,
        "batch-norm decay": recipe.model.bn_decay,
    }
    return values | ({"trust coefficient": recipe.optim.trust_coefficient} if recipe.optim.name == "lars" else {})


def quantity_text(quantity: str, value: float | None) -> str:
    """Format a quantity's value: times as h:mm:ss, large numbers with commas, "-" for None."""
    if value is None:
        return "-"
    if quantity in (TIME, IMPLIED[TIME]):
        return duration_text(value)
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:g}"


def tables_text(rows: Iterable[ExperimentComparison]) -> str:
    """Format the tables of the documents, one below the other."""
    texts = []
    for title, experiments in _titled(rows):
        blocks = [title]
        for compared in experiments:
            table = Rows((INDENTED, *COMPARED[2:]), [(compared, row) for row in compared.rows])
            note = f"\n  note: {compared.note}" if compared.note else ""
            blocks.append(f"{compared.experiment}\n  {_recipe(compared)}\n{table.text()}{note}")
        texts.append("\n\n".join(blocks) + "\n")
    return "\n".join(texts)


def tables_markdown(rows: Iterable[ExperimentComparison]) -> str:
    """Format the tables of the documents as Markdown."""
    texts = []
    for title, experiments in _titled(rows):
        table = Rows(COMPARED, [(compared, row) for compared in experiments for row in compared.rows])
        notes = (
            f"- {compared.experiment}: {_recipe(compared)}" + (f"; {compared.note}" if compared.note else "")
            for compared in experiments
        )
        texts.append("\n".join((f"### {title}", "", table.markdown(RULES), *notes)) + "\n")
    return "\n".join(texts)


def _titled(rows: Iterable[ExperimentComparison]) -> Iterator[tuple[str, list[ExperimentComparison]]]:
    """Yield the title of each table with its experiments."""
    for title, experiments in groupby(rows, lambda row: f"{row.document}: {row.table}"):
        yield title, list(experiments)


def _recipe(compared: ExperimentComparison) -> str:
    """Describe the recipe with its settings and workers."""
    return (
        f"recipe {compared.command} on {plural(compared.hosts, 'host')} x {plural(compared.ppn, 'worker')}"
        if compared.command
        else "no recipe"
    )
