"""cputrain reproduce: published claims, trained again at a size that this machine can do."""

from pathlib import Path

import click

from affinity.errors import RunError
from cputrain.cli.sweep import train_all, write_results
from cputrain.files import write_atomic
from cputrain.local import Planned, planned_here
from cputrain.recipe import load_recipe
from cputrain.reproduce import cells, filled, large_batch_table, large_batch_verdict, with_seed
from cputrain.schema import SweepSection
from cputrain.sweep import Variant, columns, variants

PICTURE = "large-batch.svg"


@click.group("reproduce")
def command() -> None:
    """Train published claims again at a size that this machine can do, and say whether they hold."""


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
