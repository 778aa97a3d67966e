"""What the reference documents publish, table by table, beside what the recipes give: pure comparison, no training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path

import yaml
from pydantic import field_validator

from affinity.topology.catalog import shipped
from cputrain.recipe.derivation import derive
from cputrain.recipe.loading import load_recipe, tuples
from cputrain.recipe.schema import Recipe
from cputrain.recipe.schema.base import Positive, Section

DOCUMENTS = ("you-et-al", "surfsara-intel", "gist", "multi-worker-lab", "lab3")
FOLDER = shipped(Path(__file__).parents[1], "published")
TIME, SPEED = "time", "images/s"
IMPLIED = {SPEED: f"{SPEED}, from the time", TIME: f"{TIME}, from images/s"}

# What is derived of every recipe, whether a document prints it or not.
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
    """What is printed, by the names in QUANTITIES."""
    time: str | None = None
    """How long it took, hours:minutes:seconds."""
    timed: bool = True
    """Whether that time is known to be that of all the recipe's images and epochs."""
    recipe: str | None = None
    """The recipe that does the same, with settings; None: the table's, if it has one."""
    settings: str = ""
    """Further settings of the table's recipe."""
    hosts: Positive = 1
    note: str = ""
    """Why the recipe gives something else, or what is to be known of the printed numbers."""

    @field_validator("published")
    @classmethod
    def _known(cls, published: dict[str, float]) -> dict[str, float]:
        if unknown := set(published) - set(QUANTITIES):
            raise ValueError(f"no such quantity: {', '.join(sorted(unknown))}")
        return published


class Table(Section):
    """A table or figure of a document, or what its text says; what its experiments share stands here."""

    title: str
    recipe: str | None = None
    note: str = ""
    timed: bool = True
    experiments: tuple[Experiment, ...]


class Document(Section):
    """A reference document's tables."""

    document: str
    tables: tuple[Table, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One quantity as printed, or implied by what is printed, and as the recipe gives it; None where there is none."""

    quantity: str
    published: float | None
    recipe: float | None
    differs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """An experiment beside its recipe: `command` is the recipe with its settings, on `hosts` hosts of `ppn` workers."""

    document: str
    table: str
    experiment: str
    command: str
    hosts: int
    ppn: int
    lines: tuple[Line, ...]
    note: str


def published_tables(documents: Sequence[str]) -> Iterator[Compared]:
    """Every row of these documents, in their order."""
    for name in documents:
        read = tuples(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))
        document = Document.model_validate(read)
        for table in document.tables:
            for experiment in table.experiments:
                yield _compared(document.document, table, experiment)


def _compared(document: str, table: Table, experiment: Experiment) -> Compared:
    command = " ".join(filter(None, (experiment.recipe or table.recipe, experiment.settings)))
    name, *settings = command.split() or [""]
    recipe = load_recipe(name, settings) if name else None
    ours = _derived(recipe, experiment.hosts) if recipe else {}
    timed = table.timed and experiment.timed
    published = _with_implied(experiment, ours if timed else {})
    shown = {*published, *(ALWAYS if ours else ())}
    return Compared(
        document=document,
        table=table.title,
        experiment=experiment.title,
        command=command,
        hosts=experiment.hosts,
        ppn=_ppn(recipe) if recipe else 0,
        lines=tuple(_line(quantity, published, ours) for quantity in QUANTITIES if quantity in shown),
        note="; ".join(filter(None, (experiment.note, table.note))),
    )


def _line(quantity: str, published: dict[str, float], ours: dict[str, float]) -> Line:
    a, b = published.get(quantity), ours.get(quantity)
    differs = a is not None and b is not None and not isclose(a, b)  # rates are products
    return Line(quantity=quantity, published=a, recipe=b, differs=differs)


def _with_implied(experiment: Experiment, ours: dict[str, float]) -> dict[str, float]:
    """What is printed, the time in seconds, and of time and images/s the one that follows from the other by the
    recipe's images and epochs."""
    found = dict(experiment.published)
    if experiment.time:
        hours, minutes, seconds = experiment.time.split(":")
        found[TIME] = 3600 * int(hours) + 60 * int(minutes) + float(seconds)
    if ours:
        images = ours["epochs"] * ours["images per epoch"]
        if TIME in found and SPEED not in found:
            found[IMPLIED[SPEED]] = round(images / found[TIME])
        elif SPEED in found and TIME not in found:
            found[IMPLIED[TIME]] = round(images / found[SPEED])
    return found


def _ppn(recipe: Recipe) -> int:
    """The workers a host, which a recipe of a published experiment names."""
    assert recipe.plan.ppn != "auto"
    return recipe.plan.ppn


def _derived(recipe: Recipe, hosts: int) -> dict[str, float]:
    """A recipe's numbers on so many hosts, by quantity."""
    data, ppn = recipe.data, _ppn(recipe)
    numbers = derive(recipe, ppn=ppn, nodes=hosts, images=data.train_images or 0)
    found: dict[str, float] = {
        "global batch": numbers.global_batch,
        "batch a worker": numbers.global_batch / (ppn * hosts),
        "workers": ppn * hosts,
        "images per epoch": numbers.images_per_epoch,
        "epochs": recipe.epochs,
        "steps per epoch": numbers.steps_per_epoch,
        "warm-up steps": numbers.warmup_steps,
        "total steps": numbers.total_steps,
        "start rate": recipe.schedule.start_rate if numbers.warmup_steps else numbers.peak_rate,
        "peak rate": numbers.peak_rate,
        "weight decay": recipe.optim.weight_decay,
        "batch-norm decay": recipe.model.bn_decay,
    }
    return found | ({"trust coefficient": recipe.optim.trust_coefficient} if recipe.optim.name == "lars" else {})


def told(quantity: str, value: float | None) -> str:
    """A quantity's value as text: times as h:mm:ss, large numbers with commas, "-" for none."""
    if value is None:
        return "-"
    if quantity in (TIME, IMPLIED[TIME]):
        minutes, seconds = divmod(round(value), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:g}"
