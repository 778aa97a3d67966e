"""cputrain sweep: one recipe with many settings, one training after another, a table and a picture of them all."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from affinity.errors import InputError, RunError
from cputrain.files import write_atomic
from cputrain.local import Planned, planned_here, train_here
from cputrain.recipe import load_recipe
from cputrain.resume import differences
from cputrain.run_folder import RECIPE
from cputrain.schema import SweepSection
from cputrain.sweep import Result, Variant, grouped, result_of, table, variants

RESULTS, PICTURE = "sweep.json", "sweep.svg"


@click.command("sweep")
@click.argument("recipe")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--grid", "grids", multiple=True, metavar="KEY=A,B,C", help="every combination of these, once for each key"
)
@click.option(
    "--run", "runs", multiple=True, metavar="'KEY=VALUE ...'", help="settings that belong together, once for each"
)
@click.option("--into", type=click.Path(path_type=Path), help="folder of the runs  [default: runs/NAME-sweep]")
@click.option("--dry-run", is_flag=True, help="print what would be trained, train nothing")
def command(
    recipe: str,
    settings: tuple[str, ...],
    grids: tuple[str, ...],
    runs: tuple[str, ...],
    into: Path | None,
    dry_run: bool,
) -> int:
    """Train RECIPE once for each combination of settings, those of its own sweep section where none are given.

    Trainings that differ by their seed are one line of the table. Called again it goes on where it was: what is done
    stays. Status 1 where a training failed; the others are trained all the same.
    """
    base = load_recipe(recipe, settings)
    chosen = variants(base.sweep, grids, runs)
    folder = into or Path(f"runs/{base.name}-sweep")
    planned = [(variant, _planned(recipe, settings, variant, folder)) for variant in chosen]
    for number, (variant, one) in enumerate(planned, 1):
        click.echo(
            f"{number:>3}/{len(planned)}  {' '.join(variant.arguments)}  (global batch {one.numbers.global_batch:,}, "
            f"{one.numbers.total_steps:,} steps)"
        )
    if dry_run:
        return 0
    results = train_all(planned)
    write_results(folder, base.name, results)
    click.echo("\n" + table(grouped(results)))
    click.echo(f"\n{folder / PICTURE}, {folder / RESULTS}")
    return 0 if all(result.top1 is not None for result in results) else 1


def _planned(recipe: str, settings: tuple[str, ...], variant: Variant, folder: Path) -> Planned:
    """A variant's training; all are looked at before the first is begun."""
    training = load_recipe(recipe, (*settings, *variant.arguments, f"output={folder / variant.folder}"))
    return planned_here(training.model_copy(update={"sweep": SweepSection()}))


def train_all(planned: list[tuple[Variant, Planned]]) -> list[Result]:
    """Train what is not done yet, one after another. Raises InputError where a folder holds another training."""
    results = []
    for number, (variant, one) in enumerate(planned, 1):
        folder = one.recipe.folder
        known = (folder / RECIPE).is_file()
        if known and differences(load_recipe(str(folder / RECIPE)), one.recipe):
            raise InputError(f"{folder} holds a run of another recipe: sweep --into another folder, or take it away")
        result = result_of(variant, folder, 0)
        if result.top1 is None:
            click.echo(f"\n{number}/{len(planned)}  {' '.join(variant.arguments)}")
            result = result_of(variant, folder, _train(one, resume=known))
        if result.status == "stopped":
            raise RunError(f"stopped in {folder}: call sweep again to go on")
        results.append(result)
    return results


def _train(one: Planned, *, resume: bool) -> int:
    try:
        status = train_here(one, resume=resume, overwrite=False, verify=True)
    except RunError as error:
        click.echo(f"cputrain: {error}", err=True)
        return 1
    if status >= 128:
        raise click.exceptions.Abort  # a signal ends the sweep too
    return status


def write_results(folder: Path, name: str, results: list[Result]) -> None:
    """sweep.json for machines, sweep.svg for people."""
    from cputrain.report.curves import sweep_curves  # matplotlib: a second that only the end needs

    text = json.dumps({"recipe": name, "runs": [asdict(result) for result in results]}, indent=1)
    write_atomic(folder / RESULTS, text.encode())
    write_atomic(folder / PICTURE, sweep_curves(name, grouped(results)).encode())
