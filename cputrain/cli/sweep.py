"""cputrain sweep: one recipe with many settings, one training after another, tables and a picture of them all."""

from collections.abc import Sequence
from pathlib import Path

import click

from affinity.errors import DoesNotFitError, InputError
from affinity.topology.sysfs import this_machine
from cputrain.cli.find_batch import find_batch
from cputrain.launch.local import Planned, planned_here
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import SweepSection
from cputrain.sweep.clock import parse_clock
from cputrain.sweep.endings import DOES_NOT_FIT, DONE, REFUSED
from cputrain.sweep.result_files import CSV, MARKDOWN, PICTURE, RESULTS, write_results
from cputrain.sweep.results import Result, grouped
from cputrain.sweep.run import Refused, train_all
from cputrain.sweep.tables import columns, table
from cputrain.sweep.variants import WORKERS, Variant, parse_workers, variants
from cputrain.sweep.workers import FEWEST, OVERSUBSCRIBE, RULE, compare, comparison_rows


@click.command("sweep")
@click.argument("recipe")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--grid", "grids", multiple=True, metavar="KEY=A,B,C", help="every combination of these, once for each key"
)
@click.option(
    "--run", "runs", multiple=True, metavar="'KEY=VALUE ...'", help="settings that belong together, once for each"
)
@click.option(
    "--workers",
    metavar="1,2,4",
    help="the same training on each of these numbers of workers, compared; without batch.global=N the global batch "
    "grows with the workers",
)
@click.option("--time", "limit", metavar="HH:MM:SS", help="limit of each training, startup included: it stops saved")
@click.option(
    "--find-batch", "find", is_flag=True, help="try larger and larger local batches instead: which still train?"
)
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="of --find-batch: a smaller limit than this machine's, for all workers together",
)
@click.option("--into", type=click.Path(path_type=Path), help="folder of the runs  [default: runs/NAME-sweep]")
@click.option("--dry-run", is_flag=True, help="print what would be trained, train nothing")
def command(
    recipe: str,
    settings: tuple[str, ...],
    grids: tuple[str, ...],
    runs: tuple[str, ...],
    workers: str | None,
    limit: str | None,
    find: bool,
    memory: float | None,
    into: Path | None,
    dry_run: bool,
) -> int:
    """Train RECIPE once for each combination of settings, those of its own sweep section where none are given.

    Trainings that differ by their seed are one line of the table. Called again it goes on where it was: what is done
    stays. One that fails, does not fit into memory or exceeds --time is a line of the table too; the others are
    trained all the same, and the status is 1. The folder gets sweep.csv, sweep.md, sweep.json, sweep.svg, and where
    worker counts differ workers.csv, workers.md, workers.json, workers.svg.
    """
    base = load_recipe(recipe, settings)
    if find:
        if grids or runs or workers or limit or dry_run:
            raise InputError("--find-batch goes with --memory and --into alone: leave the other options out")
        return find_batch(recipe, settings, into or Path(f"runs/{base.name}-find-batch"), memory_gib=memory)
    if memory is not None:
        raise InputError("--memory is of --find-batch: give both, or set a limit by the job's scheduler")
    limit_s = None if limit is None else parse_clock(limit)
    chosen = variants(base.sweep, (*_grid_of(workers), *grids), runs)
    if workers:
        chosen = tuple(map(_sharing_cores, chosen))
    folder = into or Path(f"runs/{base.name}-sweep")
    planned = [(variant, _planned(recipe, settings, variant, folder)) for variant in chosen]
    _show(planned)
    if dry_run:
        return 0
    results = train_all(planned, limit_s)
    write_results(folder, base.name, results)
    click.echo("\n" + table(grouped(results)))
    _show_comparison(results)
    click.echo(f"\n{folder / MARKDOWN}, {folder / CSV}, {folder / RESULTS}, {folder / PICTURE}")
    return 0 if all(result.status == DONE for result in results) else 1


def _grid_of(workers: str | None) -> tuple[str, ...]:
    return () if workers is None else (f"{WORKERS}={','.join(map(str, parse_workers(workers)))}",)


def _sharing_cores(variant: Variant) -> Variant:
    """The variant, its workers sharing cores where there are more of them than cores."""
    count = int(dict(variant.settings)[WORKERS])
    cores = len(this_machine().allowed_cores)
    if count <= cores:
        return variant
    click.echo(f"{count} workers on {cores} core(s) share them: they train no faster than {cores}")
    return Variant(settings=(*variant.settings, (OVERSUBSCRIBE, "true")))


def _planned(recipe: str, settings: tuple[str, ...], variant: Variant, folder: Path) -> Planned | Refused:
    """A variant's training; all are looked at before the first is begun."""
    training = load_recipe(recipe, (*settings, *variant.arguments, f"output={folder / variant.folder}"))
    try:
        return planned_here(training.model_copy(update={"sweep": SweepSection()}))
    except DoesNotFitError as error:
        return Refused(recipe=training, status=DOES_NOT_FIT, why=str(error))
    except InputError as error:
        return Refused(recipe=training, status=REFUSED, why=str(error))


def _show(planned: Sequence[tuple[Variant, Planned | Refused]]) -> None:
    """What will be trained. Raises InputError where nothing can be."""
    for number, (variant, one) in enumerate(planned, 1):
        told = (
            f"({one.status}: {one.why})"
            if isinstance(one, Refused)
            else f"(global batch {one.numbers.global_batch:,}, {one.numbers.total_steps:,} steps)"
        )
        click.echo(f"{number:>3}/{len(planned)}  {' '.join(variant.arguments)}  {told}")
    refused = [one for _, one in planned if isinstance(one, Refused)]
    if len(refused) == len(planned):
        raise InputError(f"none of {len(planned)} trainings can be started here: {refused[0].why}")


def _show_comparison(results: Sequence[Result]) -> None:
    compared = compare(results)
    if compared:
        click.echo(f"\n{columns(comparison_rows(compared))}\n{RULE}\n{FEWEST}")
