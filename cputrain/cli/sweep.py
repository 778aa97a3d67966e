"""cputrain sweep: one recipe with many settings, one training after another, tables and a picture of them all."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from affinity.errors import DoesNotFitError, InputError, RunError
from affinity.sysfs import this_machine
from cputrain.cli.find_batch import find_batch
from cputrain.files import write_atomic
from cputrain.local import Planned, planned_here, train_here
from cputrain.recipe import load_recipe
from cputrain.resume import differences
from cputrain.run_folder import LOGS, RECIPE
from cputrain.schema import Recipe, SweepSection
from cputrain.sweep.clock import parse_clock, time_limit
from cputrain.sweep.endings import DOES_NOT_FIT, DONE, REFUSED, STOPPED, TIME_LIMIT, ending, oom_kills
from cputrain.sweep.record import Record, write_record
from cputrain.sweep.results import Result, grouped, refused_result, result_of, setup_of
from cputrain.sweep.tables import columns, csv_rows, csv_text, markdown, markdown_rows, table
from cputrain.sweep.variants import WORKERS, Variant, parse_workers, variants
from cputrain.sweep.workers import FEWEST, OVERSUBSCRIBE, RULE, compare, comparison_rows

RESULTS, PICTURE, CSV, MARKDOWN = "sweep.json", "sweep.svg", "sweep.csv", "sweep.md"
COMPARISON = "workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A training that cannot be started here, and why: status "does not fit" (memory) or "refused"."""

    recipe: Recipe
    status: str
    why: str


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


def train_all(planned: Sequence[tuple[Variant, Planned | Refused]], limit_s: float | None = None) -> list[Result]:
    """Train what is not done yet, one after another, each for `limit_s` seconds at most over all its starts.

    Raises InputError where a folder holds another training.
    """
    results = []
    for number, (variant, one) in enumerate(planned, 1):
        if isinstance(one, Refused):
            results.append(refused_result(variant, one.recipe, one.status, one.why))
            continue
        folder = one.recipe.folder
        known = (folder / RECIPE).is_file()
        if known and differences(load_recipe(str(folder / RECIPE)), one.recipe):
            raise InputError(f"{folder} holds a run of another recipe: sweep --into another folder, or take it away")
        setup = setup_of(one)
        result = result_of(variant, setup, folder)
        used_s = result.wall_s or 0.0
        if result.status != DONE and (limit_s is None or used_s < limit_s):
            click.echo(f"\n{number}/{len(planned)}  {' '.join(variant.arguments)}")
            _train(one, resume=known, limit_s=limit_s, used_s=used_s)
            result = result_of(variant, setup, folder)
        if result.status == STOPPED:
            raise RunError(f"stopped in {folder}: call sweep again to go on")
        results.append(result)
    return results


def _train(one: Planned, *, resume: bool, limit_s: float | None, used_s: float) -> None:
    """Train, and keep how long it took and how it ended."""
    started, killed, told = time.monotonic(), oom_kills(), ""
    with time_limit(None if limit_s is None else limit_s - used_s) as limit:
        try:
            status = train_here(one, resume=resume, overwrite=False, verify=True)
        except RunError as error:
            told, status = str(error), 1
    if status == 1:
        click.echo(f"cputrain: {told}", err=True)
        ended, why = ending(told, oom_killed=oom_kills() > killed)
    elif status == 2:
        ended, why = REFUSED, _last_line(one.recipe.folder / LOGS / "rank-0.log")
    elif limit.reached:
        ended, why = TIME_LIMIT, f"stopped by SIGUSR1 after --time {limit_s:g} s"
    else:
        ended, why = "", ""
    used = used_s + time.monotonic() - started
    write_record(one.recipe.folder, Record(requested_s=limit_s, used_s=used, status=ended, ended_by=why))
    if status >= 128:
        raise click.exceptions.Abort  # a signal ends the sweep too


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return lines[-1].removeprefix("cputrain: ") if lines else ""


def write_results(folder: Path, name: str, results: Sequence[Result]) -> None:
    """sweep.json and .csv for machines, sweep.md and .svg for people; workers.* where worker counts differ."""
    from cputrain.report.sweep_pictures import sweep_picture, workers_picture  # matplotlib: a second, at the end only

    groups = grouped(results)
    text = json.dumps({"recipe": name, "runs": [asdict(result) for result in results]}, indent=1)
    write_atomic(folder / RESULTS, text.encode())
    write_atomic(folder / CSV, csv_text(results).encode())
    write_atomic(folder / MARKDOWN, f"# {name}\n\n{markdown(groups)}\n![curves]({PICTURE})\n".encode())
    write_atomic(folder / PICTURE, sweep_picture(name, groups).encode())
    compared = compare(results)
    if compared:
        rows, picture = comparison_rows(compared), f"{COMPARISON}.svg"
        told = {"recipe": name, "rule": RULE, "trainings": [asdict(one) for one in compared]}
        notes = f"{RULE}; {FEWEST}"
        write_atomic(folder / f"{COMPARISON}.json", json.dumps(told, indent=1).encode())
        write_atomic(
            folder / f"{COMPARISON}.csv",
            csv_rows([list(asdict(compared[0])), *(list(asdict(one).values()) for one in compared)]).encode(),
        )
        write_atomic(
            folder / f"{COMPARISON}.md",
            f"# {name}: workers compared\n\n{markdown_rows(rows)}\n{notes}\n\n![curves]({picture})\n".encode(),
        )
        write_atomic(folder / picture, workers_picture(name, results, compared).encode())


def _show_comparison(results: Sequence[Result]) -> None:
    compared = compare(results)
    if compared:
        click.echo(f"\n{columns(comparison_rows(compared))}\n{RULE}\n{FEWEST}")
