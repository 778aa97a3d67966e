"""cputrain reproduce: published claims, trained again at a size that this machine can do, and published tables."""

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import click

from affinity.errors import RunError
from cputrain.files import write_atomic
from cputrain.launch.local import Planned, planned_here
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import SweepSection
from cputrain.reproduce.large_batch import cells, filled, large_batch_table, large_batch_verdict, with_seed
from cputrain.reproduce.tables import DOCUMENTS, Compared, published_tables, told
from cputrain.sweep import Variant, columns, variants
from cputrain.sweep.result_files import write_results
from cputrain.sweep.run import train_all

PICTURE = "large-batch.svg"


@click.group("reproduce")
def command() -> None:
    """Train published claims again at a size that this machine can do, or lay published tables beside our recipes."""


@command.command("large-batch")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--scale", type=click.Choice(["mnist", "photos"]), default="mnist", show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="beginnings of each training")
@click.option("--into", type=click.Path(path_type=Path), help="folder of the runs  [default: runs/large-batch-SCALE]")
def large_batch(settings: tuple[str, ...], scale: str, seeds: int, into: Path | None) -> int:
    """LARS against momentum from small batches to large ones, in the same number of epochs.

    Every rate of the recipe large-batch-SCALE is trained with the first seed; the best of each optimizer and batch then
    with the others too. Called again it goes on where it was. data.path=DIR names the images.
    """
    name = f"large-batch-{scale}"
    folder = into or Path(f"runs/{name}")

    def planned(variant: Variant) -> Planned:
        made = load_recipe(name, (*settings, *variant.arguments, f"output={folder / variant.folder}"))
        return planned_here(made.model_copy(update={"sweep": SweepSection()}))

    every = [with_seed(variant.settings, 1) for variant in variants(load_recipe(name, settings).sweep, (), ())]
    first = [(variant, planned(variant)) for variant in every]
    click.echo(f"{len(first)} trainings with the first seed, then the best rates with {seeds - 1} more")
    tried = train_all(first)
    found = cells((one.numbers.global_batch, result) for (_, one), result in zip(first, tried, strict=True))
    if not found[0].best.top1:
        raise RunError(f"the baseline at batch {found[0].batch} did not end well: see {folder}")
    best = [(cell, [with_seed(cell.best.settings, seed) for seed in range(2, seeds + 1)]) for cell in found]
    full = []
    for cell, others in best:
        more = train_all([(variant, planned(variant)) for variant in others]) if cell.best.top1 is not None else []
        full.append(filled(cell, more))
    write_results(folder, name, [result for cell in full for result in (*cell.tried, *cell.results[1:])])

    from cputrain.report.large_batch import large_batch_picture  # matplotlib: a second that only the end needs

    write_atomic(folder / PICTURE, large_batch_picture(name, full).encode())
    click.echo("\n" + columns(large_batch_table(full)))
    click.echo(f"\n{large_batch_verdict(full)}\n{folder / PICTURE}")
    return 0


@command.command("tables")
@click.argument("documents", nargs=-1, type=click.Choice(DOCUMENTS), metavar="[DOCUMENT]...")
@click.option("--format", "form", type=click.Choice(["text", "markdown", "json"]), default="text", show_default=True)
def tables(documents: tuple[str, ...], form: str) -> None:
    """The tables of the reference documents beside what our recipes give.

    DOCUMENT is you-et-al, surfsara-intel, gist, multi-worker-lab or lab3; all of them where none is given. A recipe's
    batch, steps and rates are derived, not typed in; accuracies and times are the documents' alone: nothing is trained.
    """
    found = list(published_tables(documents or DOCUMENTS))
    if form == "json":
        click.echo(json.dumps([asdict(row) for row in found], indent=1))
        return
    one_table = {"text": _text, "markdown": _markdown}[form]
    for title, rows in groupby(found, lambda row: f"{row.document}: {row.table}"):
        click.echo(one_table(title, list(rows)))


def _text(title: str, rows: list[Compared]) -> str:
    blocks = [title]
    for row in rows:
        lines = [("", "published", "recipe", ""), *((f"  {cell}", *rest) for cell, *rest in _cells(row))]
        note = f"\n  note: {row.note}" if row.note else ""
        blocks.append(f"{row.experiment}\n  {_recipe(row)}\n{columns(lines)}{note}")
    return "\n\n".join(blocks) + "\n"


def _markdown(title: str, rows: list[Compared]) -> str:
    lines = [f"### {title}", "", "| experiment | quantity | published | recipe | |", "|---|---|---:|---:|---|"]
    lines += [f"| {row.experiment} | {' | '.join(cells)} |" for row in rows for cells in _cells(row)]
    notes = (f"- {row.experiment}: {_recipe(row)}" + (f"; {row.note}" if row.note else "") for row in rows)
    return "\n".join((*lines, "", *notes)) + "\n"


def _cells(row: Compared) -> list[tuple[str, ...]]:
    """Quantity, published value, the recipe's, and whether they differ."""
    return [
        (
            line.quantity,
            told(line.quantity, line.published),
            told(line.quantity, line.recipe),
            "differs" if line.differs else "",
        )
        for line in row.lines
    ]


def _recipe(row: Compared) -> str:
    """The recipe with its settings and workers."""
    return f"recipe {row.command} on {row.hosts:,} host(s) x {row.ppn} worker(s)" if row.command else "no recipe"
