"""cputrain reproduce: published claims, trained again at this machine's size, and published tables."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import click

from affinity.text_table import align_columns
from cputrain.cli.groups import WholeSummaries
from cputrain.cli.options import settings_argument
from cputrain.reproduce.large_batch import large_batch_table, large_batch_verdict
from cputrain.reproduce.run_large_batch import PICTURE, run_large_batch
from cputrain.reproduce.table_text import tables_markdown, tables_text
from cputrain.reproduce.tables import DOCUMENTS, published_tables


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
    folder = output or Path(f"runs/large-batch-{scale}")
    found = run_large_batch(scale, settings, seeds, folder, os.environ, click.echo)
    click.echo("\n" + align_columns(large_batch_table(found), numbers=True))
    click.echo(f"\n{large_batch_verdict(found)}\n{folder / PICTURE}")
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
    else:
        click.echo({"text": tables_text, "markdown": tables_markdown}[output_format](found))
