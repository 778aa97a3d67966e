"""cputrain reproduce: published claims, trained again at this machine's size, and published tables."""

import json
import os
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import click

from affinity.errors import RunError
from affinity.text_table import align_columns, markdown_table
from affinity.wording import counted
from cputrain.cli.groups import WholeSummaries
from cputrain.cli.options import settings_argument
from cputrain.files import write_atomic
from cputrain.launch.local import PlannedTraining, plan_training
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import SweepSection
from cputrain.reproduce.large_batch import (
    by_batch,
    large_batch_table,
    large_batch_verdict,
    with_all_seeds,
    with_seed,
)
from cputrain.reproduce.tables import DOCUMENTS, ExperimentComparison, published_tables, quantity_text
from cputrain.sweep import Variant, variants
from cputrain.sweep.result_files import write_results
from cputrain.sweep.run import train_all

PICTURE = "large-batch.svg"


@click.group("reproduce", cls=WholeSummaries)
def command() -> None:
    """Repeat published experiments at this machine's size, or compare published tables with our recipes."""


@command.command("large-batch")
@settings_argument
@click.option(
    "--scale",
    type=click.Choice(["mnist", "photos"]),
    default="mnist",
    show_default=True,
    help="recipe to train: large-batch-mnist or large-batch-photos",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="random seeds of each training",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="folder of the trainings and results  [default: runs/large-batch-SCALE]",
)
def large_batch(settings: tuple[str, ...], scale: str, seeds: int, output: Path | None) -> int:
    """Compare LARS with momentum from small to large batches, in the same number of epochs.

    The first seed trains every learning rate of the recipe large-batch-SCALE; the other seeds train the best rate of
    each optimizer and batch. A repeated call continues. Name the folder of the images with data.path=DIR.
    """
    name = f"large-batch-{scale}"
    folder, env = output or Path(f"runs/{name}"), os.environ

    def plan(variant: Variant) -> PlannedTraining:
        recipe = load_recipe(name, (*settings, *variant.arguments, f"output={folder / variant.folder}"))
        return plan_training(recipe.model_copy(update={"sweep": SweepSection()}), env)

    every = [with_seed(variant.settings, 1) for variant in variants(load_recipe(name, settings).sweep, (), ())]
    first = [(variant, plan(variant)) for variant in every]
    click.echo(
        f"{len(first)} trainings with the first seed, then the best rates with {counted(seeds - 1, 'more seed')}"
    )
    tried = train_all(first, env)
    found = by_batch((one.sizes.global_batch, result) for (_, one), result in zip(first, tried, strict=True))
    if not found[0].best.top1:
        raise RunError(f"the baseline with global batch {found[0].batch} did not finish: see its logs in {folder}")
    best = [(entry, [with_seed(entry.best.settings, seed) for seed in range(2, seeds + 1)]) for entry in found]
    full = []
    for entry, others in best:
        more = train_all([(variant, plan(variant)) for variant in others], env) if entry.best.top1 is not None else []
        full.append(with_all_seeds(entry, more))
    write_results(folder, name, [result for entry in full for result in (*entry.tried, *entry.results[1:])])

    from cputrain.reproduce.chart import large_batch_chart  # matplotlib: a second that only the end needs

    write_atomic(folder / PICTURE, large_batch_chart(name, full).encode())
    click.echo("\n" + align_columns(large_batch_table(full), numbers=True))
    click.echo(f"\n{large_batch_verdict(full)}\n{folder / PICTURE}")
    return 0


@command.command("tables")
@click.argument("documents", nargs=-1, type=click.Choice(DOCUMENTS), metavar="[DOCUMENT]...")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "markdown", "json"]),
    default="text",
    show_default=True,
    help="what to print",
)
def tables(documents: tuple[str, ...], output_format: str) -> None:
    """Print the tables of the reference documents beside the sizes that our recipes derive; nothing is trained.

    DOCUMENT is you-et-al, surfsara-intel, gist, multi-worker-lab or lab3; without it, all of them are printed. Batch,
    steps and learning rates are derived from the recipes; accuracies and times are the documents' own.
    """
    found = list(published_tables(documents or DOCUMENTS))
    if output_format == "json":
        click.echo(json.dumps([asdict(row) for row in found], indent=1))
        return
    one_table = {"text": _text, "markdown": _markdown}[output_format]
    for title, experiments in groupby(found, lambda row: f"{row.document}: {row.table}"):
        click.echo(one_table(title, list(experiments)))


def _text(title: str, experiments: list[ExperimentComparison]) -> str:
    blocks = [title]
    for one in experiments:
        rows = [("", "published", "recipe", ""), *((f"  {cell}", *rest) for cell, *rest in _cells(one))]
        note = f"\n  note: {one.note}" if one.note else ""
        blocks.append(f"{one.experiment}\n  {_recipe(one)}\n{align_columns(rows, numbers=True)}{note}")
    return "\n\n".join(blocks) + "\n"


def _markdown(title: str, experiments: list[ExperimentComparison]) -> str:
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
