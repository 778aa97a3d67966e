"""The published trainings' settings as tables."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isclose

import yaml
from pydantic import field_validator

from cputrain.affinity.terminal import align_columns, markdown_table
from cputrain.affinity.topology.catalog import shipped
from cputrain.affinity.wording import counted
from cputrain.recipe.derivation import derive
from cputrain.recipe.loading import load_recipe, tuples
from cputrain.recipe.schema import Positive, Recipe, Section

DOCUMENTS = ("you-et-al", "surfsara-intel", "gist", "multi-worker-lab", "lab3")
FOLDER = shipped("published")
TIME, SPEED = "time", "images/s"
IMPLIED = {SPEED: f"{SPEED}, from the time", TIME: f"{TIME}, from images/s"}

# Shown for every recipe, whether a document prints it or not.
ALWAYS = ("global batch", "workers", "epochs", "steps per epoch", "warm-up steps", "total steps", "peak rate")
QUANTITIES = (
    *("global batch", "batch a worker", "workers", "images per epoch", "epochs", "steps per epoch", "warm-up steps"),
    *("total steps", "start rate", "peak rate", "weight decay", "batch-norm decay", "trust coefficient"),
    *("weight norm", "gradient norm", "ratio of norms", "training top-1 %", "top-1 %", "top-5 %", "test top-1 %"),
    *("accuracy %", "efficiency %", "seconds an epoch", SPEED, IMPLIED[SPEED], TIME, IMPLIED[TIME]),
)


class Experiment(Section):
    """One row of a table."""

    title: str
    published: dict[str, float]
    """The printed values, by the names in QUANTITIES."""
    time: str | None = None
    """The published duration, hours:minutes:seconds."""
    timed: bool = True
    """Whether the duration is known to cover all the recipe's images and epochs."""
    recipe: str | None = None
    """The recipe of the same training, with settings; None: the table's, if it has one."""
    settings: str = ""
    """Further settings of the table's recipe."""
    hosts: Positive = 1
    note: str = ""
    """Why the recipe differs, or a remark on the printed values."""

    @field_validator("published")
    @classmethod
    def _known(cls, published: dict[str, float]) -> dict[str, float]:
        if unknown := set(published) - set(QUANTITIES):
            raise ValueError(f"no such quantity: {', '.join(sorted(unknown))}")
        return published


class PublishedTable(Section):
    """A table, figure or passage of a document, with the values that its experiments share."""

    title: str
    recipe: str | None = None
    note: str = ""
    timed: bool = True
    experiments: tuple[Experiment, ...]


class Document(Section):
    """A reference document's tables."""

    document: str
    tables: tuple[PublishedTable, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityRow:
    """One quantity: the published value (printed, or implied by printed ones) and the recipe's; None: there is none."""

    quantity: str
    published: float | None
    recipe: float | None
    differs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentComparison:
    """An experiment and its recipe: `command` is the recipe with settings, on `hosts` hosts with `ppn` workers each."""

    document: str
    table: str
    experiment: str
    command: str
    hosts: int
    ppn: int
    rows: tuple[QuantityRow, ...]
    note: str


def published_tables(documents: Sequence[str]) -> Iterator[ExperimentComparison]:
    """Every experiment of these documents, in their order."""
    for name in documents:
        read = tuples(yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")))
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
        ppn=_ppn(recipe) if recipe else 0,
        rows=tuple(_row(quantity, published, derived) for quantity in QUANTITIES if quantity in shown),
        note="; ".join(filter(None, (experiment.note, table.note))),
    )


def _row(quantity: str, published: dict[str, float], derived: dict[str, float]) -> QuantityRow:
    a, b = published.get(quantity), derived.get(quantity)
    differs = a is not None and b is not None and not isclose(a, b)  # rates are products
    return QuantityRow(quantity=quantity, published=a, recipe=b, differs=differs)


def _with_implied(experiment: Experiment, derived: dict[str, float]) -> dict[str, float]:
    """The printed values, the time in seconds, and time or images/s where only the other one is printed.

    One follows from the other through the recipe's images and epochs.
    """
    found = dict(experiment.published)
    if experiment.time:
        hours, minutes, seconds = experiment.time.split(":")
        found[TIME] = 3600 * int(hours) + 60 * int(minutes) + float(seconds)
    if derived:
        images = derived["epochs"] * derived["images per epoch"]
        if TIME in found and SPEED not in found:
            found[IMPLIED[SPEED]] = round(images / found[TIME])
        elif SPEED in found and TIME not in found:
            found[IMPLIED[TIME]] = round(images / found[SPEED])
    return found


def _ppn(recipe: Recipe) -> int:
    """Workers per host; every recipe of a published experiment names them."""
    assert recipe.plan.ppn != "auto"
    return int(recipe.plan.ppn)


def _derived(recipe: Recipe, hosts: int) -> dict[str, float]:
    """A recipe's sizes on that many hosts, by quantity."""
    data, ppn = recipe.data, _ppn(recipe)
    sizes = derive(recipe, ppn=ppn, nodes=hosts, images=data.train_images or 0)
    found: dict[str, float] = {
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
    return found | ({"trust coefficient": recipe.optim.trust_coefficient} if recipe.optim.name == "lars" else {})


def quantity_text(quantity: str, value: float | None) -> str:
    """A quantity's value as text: times as h:mm:ss, large numbers with commas, "-" for None."""
    if value is None:
        return "-"
    if quantity in (TIME, IMPLIED[TIME]):
        minutes, seconds = divmod(round(value), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:g}"


def tables_text(rows: Iterable[ExperimentComparison]) -> str:
    """The tables of the documents, one below the other."""
    return _each_table(rows, _text)


def tables_markdown(rows: Iterable[ExperimentComparison]) -> str:
    """The tables of the documents in Markdown."""
    return _each_table(rows, _markdown)


def _each_table(
    rows: Iterable[ExperimentComparison], one_table: Callable[[str, Sequence[ExperimentComparison]], str]
) -> str:
    titled = groupby(rows, lambda row: f"{row.document}: {row.table}")
    return "\n".join(one_table(title, list(experiments)) for title, experiments in titled)


def _text(title: str, experiments: Sequence[ExperimentComparison]) -> str:
    blocks = [title]
    for one in experiments:
        rows = [("", "published", "recipe", ""), *((f"  {cell}", *rest) for cell, *rest in _cells(one))]
        note = f"\n  note: {one.note}" if one.note else ""
        blocks.append(f"{one.experiment}\n  {_recipe(one)}\n{align_columns(rows, numbers=True)}{note}")
    return "\n\n".join(blocks) + "\n"


def _markdown(title: str, experiments: Sequence[ExperimentComparison]) -> str:
    rows = [("experiment", "quantity", "published", "recipe", "")]
    rows += [(one.experiment, *cells) for one in experiments for cells in _cells(one)]
    notes = (f"- {one.experiment}: {_recipe(one)}" + (f"; {one.note}" if one.note else "") for one in experiments)
    rules = ("---", "---", "---:", "---:", "---")
    return "\n".join((f"### {title}", "", markdown_table(rows, rules=rules), *notes)) + "\n"


def _cells(one: ExperimentComparison) -> list[tuple[str, str, str, str]]:
    """Quantity, published value, the recipe's value, and "differs" where the two differ."""
    return [
        (
            row.quantity,
            quantity_text(row.quantity, row.published),
            quantity_text(row.quantity, row.recipe),
            "differs" if row.differs else "",
        )
        for row in one.rows
    ]


def _recipe(one: ExperimentComparison) -> str:
    """The recipe with its settings and workers."""
    return (
        f"recipe {one.command} on {counted(one.hosts, 'host')} x {counted(one.ppn, 'worker')}"
        if one.command
        else "no recipe"
    )
