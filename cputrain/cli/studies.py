"""`cputrain sweep`, `reproduce` and `simulate`."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from cputrain.affinity.errors import DoesNotFitError, InputError, RunError, as_recipe_key, describe_error
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import GIB, plural
from cputrain.cli.options import settings_argument
from cputrain.cli.output import (
    amount_option,
    format_option,
    formats_option,
    number_option,
    only_results_on_stdout,
    parse_clock,
    path_option,
    print_json,
)
from cputrain.cli.words import FullSummaryGroup, complete_machine, complete_recipe, complete_setting
from cputrain.mpi.hostfile import MAX_HOSTS
from cputrain.predict.assumptions import LINKED, link_of, published_runs, runs_on
from cputrain.predict.collectives import ALGORITHMS
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import Recipe, SweepSection
from cputrain.studies.reproduce import (
    DOCUMENTS,
    LARGE_BATCH_PICTURE,
    large_batch_table,
    large_batch_verdict,
    published_tables,
    run_large_batch,
    tables_markdown,
    tables_text,
)
from cputrain.studies.simulate.predict import Row, Scenario, check_global_batch, parse_start_rate, reference_of, rows_of
from cputrain.studies.simulate.setup import find_measured_rate, outdated_measurements, trace_unknown
from cputrain.studies.sweep.find_batch import CSV as BATCH_CSV
from cputrain.studies.sweep.find_batch import ENDED_BY, BatchSearch, find_batch
from cputrain.studies.sweep.find_batch import MARKDOWN as BATCH_MARKDOWN
from cputrain.studies.sweep.results import (
    BASELINE_NOTE,
    CSV,
    MARKDOWN,
    OVERSUBSCRIBE,
    PICTURE,
    RESULTS,
    RULE,
    compare_workers,
    comparison_rows,
    results_as_json,
    results_text,
    write_results,
)
from cputrain.studies.sweep.trainings import (
    DOES_NOT_FIT,
    DONE,
    INVALID,
    WORKERS,
    InvalidTraining,
    RunResult,
    Variant,
    group_by_seed,
    parse_workers,
    train_all,
    variants,
)
from cputrain.training.local import PlannedTraining, plan_training

NUMBERS = re.compile(r"\d{1,6}(,\d{1,6})*(,\.\.\.,\d{1,6})?")
WHAT_IF = {
    "local_batch": "batch.local",
    "compression": "comm.compression",
    "workers": "plan.ppn",
    "comm_cores": "plan.comm_cores",
}
MIN_NUMBERS = 2  # before ",...,", which tell how to go on
MAX_ROWS = 1000  # numbers of hosts


@click.command("sweep")
@click.argument("recipe", shell_complete=complete_recipe)
@settings_argument
@click.option(
    "--grid",
    "grids",
    shell_complete=complete_setting,
    multiple=True,
    metavar="KEY=A,B,C",
    help="train every combination of these values; repeatable, once per key",
)
@click.option(
    "--run",
    "runs",
    multiple=True,
    metavar="'KEY=VALUE ...'",
    help="train with these settings; repeatable, once per run",
)
@click.option(
    "--workers",
    metavar="1,2,4",
    help="repeat the training with these numbers of workers and compare (the global batch grows with the workers "
    "unless batch.global=N is set)",
)
@click.option(
    "--time", "limit", metavar="HH:MM:SS", help="save and stop each training after this time, startup included"
)
@click.option(
    "--find-batch",
    "find",
    is_flag=True,
    help="search for the largest local batch that fits into memory, instead of a sweep",
)
@amount_option(
    "--memory",
    above=0,
    metavar="GIB",
    help="limit the memory of all workers together below this machine's; needs --find-batch",
)
@path_option("--output", metavar="DIR", help="write trainings and results into DIR  [default: runs/NAME-sweep]")
@click.option("--dry-run", is_flag=True, help="print the list of trainings; train nothing")
@format_option
def sweep_command(
    recipe: str,
    settings: tuple[str, ...],
    grids: tuple[str, ...],
    runs: tuple[str, ...],
    workers: str | None,
    limit: str | None,
    find: bool,
    memory: float | None,
    output: Path | None,
    dry_run: bool,
    output_format: str,
) -> int:
    """Train RECIPE once per combination of settings; without options, as the recipe's sweep section lists them.

    Trainings that differ only in their seed share a table row. A repeated sweep continues and keeps finished trainings.
    A training that fails, does not fit into memory or exceeds --time also gets a row; the others go on, and the exit
    status is 1. The folder gets sweep.csv, sweep.md, sweep.json and sweep.svg; if the number of workers varies, also
    workers.csv, workers.md, workers.json and workers.svg.
    """
    settings, output = _with_output(settings, output)
    env, base = os.environ, load_recipe(recipe, settings)
    if find:
        if grids or runs or workers or limit or dry_run:
            raise InputError("--find-batch can only be combined with --memory and --output: remove the other options")
        memory_bytes = None if memory is None else round(memory * GIB)
        folder = output or Path(f"runs/{base.name}-find-batch")
        return _find_batch(
            BatchSearch(
                name=recipe, settings=settings, start=base.batch.local, folder=folder, limit=memory_bytes, env=env
            ),
            output_format,
        )
    if memory is not None:
        raise InputError("--memory needs --find-batch: add it, or set a memory limit through the job's scheduler")
    limit_s = None if limit is None else parse_clock(limit)
    grid = () if workers is None else (f"{WORKERS}={','.join(map(str, parse_workers(workers)))}",)
    chosen = variants(base.sweep, (*grid, *grids), runs)
    folder = output or Path(f"runs/{base.name}-sweep")
    with only_results_on_stdout(output_format):
        if workers:
            chosen = tuple(map(_sharing_cores, chosen))
        planned = [
            (
                variant,
                _plan(load_recipe(recipe, (*settings, *variant.arguments, f"output={folder / variant.folder}")), env),
            )
            for variant in chosen
        ]
        _show(planned)
        results = [] if dry_run else train_all(planned, env, limit_s)
        if not dry_run:
            write_results(folder, base.name, results)
            _show_results(results, folder)
    if output_format == "json":
        print_json(
            _planned_as_json(planned) if dry_run else {"folder": str(folder), **results_as_json(base.name, results)}
        )
    return 0 if all(result.status == DONE for result in results) else 1


def _with_output(settings: tuple[str, ...], output: Path | None) -> tuple[tuple[str, ...], Path | None]:
    """Return the settings without output=DIR, and the folder of all trainings from output=DIR or --output."""
    outputs = [word.partition("=")[2] for word in settings if word.partition("=")[0] == "output"]
    if outputs and output is not None:
        raise InputError(f"output={outputs[-1]} and --output {output} name two folders: give one")
    rest_of_settings = tuple(word for word in settings if word.partition("=")[0] != "output")
    return rest_of_settings, Path(outputs[-1]) if outputs and outputs[-1] else output


def _show_results(results: Sequence[RunResult], folder: Path) -> None:
    """Print the tables of a finished sweep and the files written."""
    click.echo("\n" + results_text(group_by_seed(results)))
    compared = compare_workers(results)
    if compared:
        click.echo(f"\n{comparison_rows(compared).text()}\n{RULE}\n{BASELINE_NOTE}")
    click.echo(f"\n{folder / MARKDOWN}, {folder / CSV}, {folder / RESULTS}, {folder / PICTURE}")


def _planned_as_json(planned: Sequence[tuple[Variant, PlannedTraining | InvalidTraining]]) -> dict[str, Any]:
    """Return a dry run's trainings for JSON; sizes are null for a training that cannot start here."""
    trainings = []
    for variant, training in planned:
        sizes = None if isinstance(training, InvalidTraining) else training.sizes
        trainings.append(
            {
                "settings": dict(variant.settings),
                "global_batch": sizes and sizes.global_batch,
                "steps": sizes and sizes.total_steps,
                "refused": f"{training.status}: {training.why}" if isinstance(training, InvalidTraining) else None,
            }
        )
    return {"trainings": trainings}


def _sharing_cores(variant: Variant) -> Variant:
    """Return the variant, with oversubscription if it has more workers than cores."""
    count = int(dict(variant.settings)[WORKERS])
    cores = len(this_machine().allowed_cores)
    if count <= cores:
        return variant
    click.echo(f"{count} workers share {plural(cores, 'core')}: they train no faster than {plural(cores, 'worker')}")
    return Variant(settings=(*variant.settings, (OVERSUBSCRIBE, "true")))


def _plan(training: Recipe, env: Mapping[str, str]) -> PlannedTraining | InvalidTraining:
    """Plan a variant's training; all are planned before the first one starts."""
    try:
        return plan_training(training.model_copy(update={"sweep": SweepSection()}), env)
    except DoesNotFitError as error:
        return InvalidTraining(recipe=training, status=DOES_NOT_FIT, why=describe_error(error, as_recipe_key))
    except InputError as error:
        return InvalidTraining(recipe=training, status=INVALID, why=describe_error(error, as_recipe_key))


def _show(planned: Sequence[tuple[Variant, PlannedTraining | InvalidTraining]]) -> None:
    """Print the list of trainings. Raises InputError if none of them can start."""
    for number, (variant, training) in enumerate(planned, 1):
        text = (
            f"({training.status}: {training.why})"
            if isinstance(training, InvalidTraining)
            else f"(global batch {training.sizes.global_batch:,}, {plural(training.sizes.total_steps, 'step')})"
        )
        click.echo(f"{number:>3}/{len(planned)}  {' '.join(variant.arguments)}  {text}")
    invalid = [training for _, training in planned if isinstance(training, InvalidTraining)]
    if len(invalid) == len(planned):
        raise InputError(f"none of {len(planned)} trainings can start here: {invalid[0].why}")


def _find_batch(search: BatchSearch, output_format: str) -> int:
    """Print the largest local batch that trains, and why the next one does not. Raises RunError if none trains."""
    with only_results_on_stdout(output_format):
        result = find_batch(search)
        click.echo("\n" + result.table.without(ENDED_BY).text() + "\n")
    best, larger = result.best, result.next_larger
    cause = f"{larger.local_batch}: {larger.status}: {larger.ended_by}"
    if best is None:
        raise RunError(f"no local batch trains, not even {cause}")
    if output_format == "json":
        trials = [asdict(trial) for trial in result.trials]
        print_json({"folder": str(search.folder), "largest": best.local_batch, "trials": trials})
        return 0
    click.echo(
        f"largest that trains: batch.local={best.local_batch} (global batch {best.global_batch:,}) in {best.memory}\n"
        f"next larger: {cause}\n{search.folder / BATCH_MARKDOWN}, {search.folder / BATCH_CSV}"
    )
    return 0


@click.group("reproduce", cls=FullSummaryGroup)
def reproduce_command() -> None:
    """Repeat published experiments, scaled to this machine, or compare published tables with the recipes."""


@reproduce_command.command("large-batch")
@settings_argument
@click.option(
    "--scale",
    type=click.Choice(["mnist", "photos"]),
    default="mnist",
    show_default=True,
    help="train the recipe large-batch-mnist or large-batch-photos",
)
@number_option("--seeds", default=3, help="repeat each training with N random seeds")
@path_option("--output", metavar="DIR", help="write trainings and results into DIR  [default: runs/large-batch-SCALE]")
def large_batch(settings: tuple[str, ...], scale: str, seeds: int, output: Path | None) -> int:
    """Compare LARS with momentum from small to large batches over the same number of epochs.

    The first seed trains every learning rate of the recipe large-batch-SCALE; the other seeds train the best learning
    rate of each optimizer and batch. A repeated call continues. Set the folder of the images with data.path=DIR.
    """
    folder = output or Path(f"runs/large-batch-{scale}")
    results = run_large_batch(scale, settings, seeds, folder, os.environ, click.echo)
    click.echo("\n" + large_batch_table(results).text())
    click.echo(f"\n{large_batch_verdict(results)}\n{folder / LARGE_BATCH_PICTURE}")
    return 0


@reproduce_command.command("tables")
@click.argument("documents", nargs=-1, type=click.Choice(DOCUMENTS), metavar="[DOCUMENT]...")
@formats_option("markdown", "json")
def tables(documents: tuple[str, ...], output_format: str) -> None:
    """Print the tables of the reference documents next to the sizes derived from the recipes; train nothing.

    DOCUMENT is you-et-al, surfsara-intel, gist, multi-worker-lab or lab3; by default all of them are printed. Batches,
    steps and learning rates are derived from the recipes; accuracies and times are copied from the documents.
    """
    compared = list(published_tables(documents or DOCUMENTS))
    if output_format == "json":
        click.echo(json.dumps([asdict(row) for row in compared], indent=1))
    else:
        click.echo({"text": tables_text, "markdown": tables_markdown}[output_format](compared))


@click.command("simulate")
@click.argument("recipe", shell_complete=complete_recipe)
@settings_argument
@click.option(
    "--machine",
    shell_complete=complete_machine,
    default="this",
    metavar="MACHINE",
    show_default=True,
    help="predict for this machine; accepts the same as `cputrain plan`",
)
@click.option(
    "--nodes", default="1,2,4,...,256", metavar="N,N,...", show_default=True, help="predict for these numbers of hosts"
)
@click.option(
    "--fabric",
    type=click.Choice(LINKED),
    default="opa",
    show_default=True,
    help="assume this network between the hosts",
)
@amount_option(
    "--rate",
    above=0,
    metavar="IMG/S",
    help="assume IMG/S images/s on one host with this recipe  [default: as measured by `bench model`, or published]",
)
@click.option(
    "--from",
    "start",
    metavar="RUN",
    help="derive the processor's speed from a run: the name of a published one, or IMG/S@HOSTSxWORKERSxBATCH with "
    "workers per host and images per worker and step, as in 6303@64x2x32",
)
@amount_option(
    "--bandwidth", least=0.001, metavar="GBIT/S", help="assume this speed of a host's link  [default: the fabric's]"
)
@amount_option("--latency-us", metavar="US", help="assume this message latency between hosts  [default: the fabric's]")
@number_option("--local-batch", help="set batch.local, the images per worker and backward pass")
@click.option(
    "--compression",
    type=click.Choice(["none", "bf16"]),
    help="set comm.compression, the gradients' format on the network",
)
@number_option("--workers", help="set plan.ppn, the workers per host")
@number_option("--comm-cores", least=0, help="set plan.comm_cores, the cores per worker for communication")
@click.option(
    "--algorithm", type=click.Choice(ALGORITHMS), help="assume this all-reduce  [default: oneCCL's for the fabric]"
)
@amount_option("--watts", above=0, metavar="W", help="compute the energy from this power per host")
@click.option(
    "--best", is_flag=True, help="search for the plan with the shortest time to train on the last number of hosts"
)
@number_option("--batch-limit", help="limit the global batch that --best may choose  [default: the recipe's]")
@click.option("--explain", "explained", is_flag=True, help="add every assumption with its range and source")
@formats_option(
    "json",
    "svg",
    "timeline",
    help="choose the output; svg: scaling over hosts; timeline: SVG of a step on the last number of hosts",
)
def simulate_command(
    recipe: str,
    settings: tuple[str, ...],
    machine: str,
    nodes: str,
    fabric: str,
    rate: float | None,
    start: str | None,
    bandwidth: float | None,
    latency_us: float | None,
    algorithm: str | None,
    watts: float | None,
    best: bool,
    batch_limit: int | None,
    explained: bool,
    output_format: str,
    **what_if: Any,
) -> None:
    """Predict images/s, efficiency and time to train of RECIPE on many hosts, without the hosts and the data.

    The prediction starts from a published or measured rate of the processor; the range is the uncertainty from the
    assumptions (--explain).
    """
    from cputrain.affinity.planner.records import read_measured, read_records
    from cputrain.affinity.topology.catalog import find_machine
    from cputrain.recipe.request import request_of

    counts = numbers_of_hosts(nodes)
    training = load_recipe(recipe, (*settings, *_what_if_settings(settings, what_if))).as_planned()
    trace_unknown(training.model.name, training.data.crop)
    host_machine = find_machine(machine)
    env = os.environ
    records, rates = read_records(host_machine, env), read_measured(host_machine, request_of(training), env)
    for note in (*records.notes, *outdated_measurements(records)):
        click.echo(note, err=True)
    link = link_of(fabric, gbit=bandwidth, latency_us=latency_us)
    if rate is not None and start is not None:
        raise InputError("--rate and --from both set the processor's speed: give one of them")
    scenario = Scenario(
        recipe=training,
        machine=host_machine,
        link=link,
        reference=reference_of(
            host_machine,
            training,
            rate,
            find_measured_rate(records, training.precision, training.model.name, training.data.crop),
            rates,
        )
        if start is None
        else parse_start_rate(start, host_machine, training, link, rates),
        algorithm=algorithm,
        measured=rates,
    )
    check_global_batch(scenario, counts)
    if best:
        _check_best(watts, output_format, explained=explained)
        _show_best(scenario, counts[-1], batch_limit, output_format)
        return
    if batch_limit is not None:
        raise InputError("--batch-limit needs --best: add it")
    if output_format == "timeline":
        _show_timeline(scenario, counts[-1])
        return
    _show_rows(scenario, rows_of(scenario, counts, watts=watts), output_format, explained=explained)


def _check_best(watts: float | None, output_format: str, *, explained: bool) -> None:
    """Raise InputError for an option that --best does not use."""
    unfit = {
        "--watts": watts is not None,
        "--explain": explained,
        f"--format {output_format}": output_format in ("svg", "timeline"),
    }
    if option := next((name for name, is_set in unfit.items() if is_set), None):
        raise InputError(f"--best prints plans as text or JSON: remove {option}")


def _show_rows(scenario: Scenario, rows: tuple[Row, ...], output_format: str, *, explained: bool) -> None:
    from cputrain.studies.simulate.output import assumptions_text, rows_json, rows_text

    if output_format == "json":
        click.echo(rows_json(scenario, rows))
    elif output_format == "svg":
        from cputrain.studies.simulate.output import scaling_svg  # matplotlib, only needed for pictures

        click.echo(scaling_svg(scenario, rows))
    else:
        reference, link = scenario.reference, scenario.link
        click.echo(
            f"{scenario.recipe.name} on {scenario.machine.name}, {link.name} of {link.nominal_gbit:g} Gbit/s; "
            f"based on {reference.images_per_s:,.4g} images/s on {plural(reference.setup.hosts, 'host')} "
            f"({reference.source})"
        )
        names_of_runs = [run.name for run in runs_on(scenario.machine.model, scenario.recipe.precision)]
        if reference.source in [run.source for run in published_runs()] and len(names_of_runs) > 1:
            click.echo(f"other runs to start --from: {', '.join(names_of_runs)}")
        click.echo(rows_text(rows))
        if explained:
            click.echo("\nassumptions\n" + assumptions_text(scenario))


def numbers_of_hosts(text: str) -> tuple[int, ...]:
    """Parse numbers of hosts, ascending: "1,2,4", or "1,2,4,...,256", in which ... continues by doubling or adding.

    Raises InputError if the text is not such a list.
    """
    wrong = InputError(
        f"--nodes {text} is not a list of numbers: give numbers of hosts, as in 1,8,256 or 1,2,4,...,256"
    )
    if not NUMBERS.fullmatch(text):
        raise wrong
    first, _, last = text.partition(",...,")
    numbers = [int(number) for number in first.split(",")]
    if last:
        if len(numbers) < MIN_NUMBERS or numbers[-1] <= numbers[-2] or int(last) <= numbers[-1] or numbers[-2] < 1:
            raise wrong
        if int(last) <= MAX_HOSTS:  # else rejected below
            numbers = _continued(numbers, int(last))
        else:
            numbers.append(int(last))
    if not all(1 <= number <= MAX_HOSTS for number in numbers):
        raise InputError(f"--nodes {text} is out of range: give numbers of hosts from 1 to {MAX_HOSTS:,}")
    if len(numbers) > MAX_ROWS:
        raise InputError(f"--nodes {text} has more than {MAX_ROWS:,} numbers: double them, as in 1,2,4,...,4096")
    return tuple(sorted(set(numbers)))


def _continued(numbers: list[int], last: int) -> list[int]:
    """Continue the numbers up to `last`, by the same factor or else by the same difference."""
    factor, rest = divmod(numbers[-1], numbers[-2])
    geometric = rest == 0 and all(b == a * factor for a, b in pairwise(numbers))
    step = numbers[-1] - numbers[-2]
    while (following := numbers[-1] * factor if geometric else numbers[-1] + step) < last:
        if len(numbers) > MAX_ROWS:
            break
        numbers.append(following)
    return [*numbers, last]


def _what_if_settings(settings: tuple[str, ...], what_if: dict[str, Any]) -> tuple[str, ...]:
    """Return the what-if options as recipe settings. Raises InputError if a setting already sets the same key."""
    keys = {setting.partition("=")[0] for setting in settings}
    overrides = []
    for name, key in WHAT_IF.items():
        if what_if[name] is None:
            continue
        if key in keys:
            raise InputError(f"--{name.replace('_', '-')} and {key}=VALUE set the same key: give one of them")
        overrides.append(f"{key}={what_if[name]}")
    return tuple(overrides)


def _show_best(scenario: Scenario, hosts: int, batch_limit: int | None, output_format: str) -> None:
    from cputrain.studies.simulate.output import candidates_json, candidates_text
    from cputrain.studies.simulate.predict import best_plan

    candidates = best_plan(scenario, hosts, batch_limit)
    if output_format == "json":
        click.echo(candidates_json(scenario, candidates))
        return
    click.echo(f"{scenario.recipe.name} on {plural(hosts, 'host')} of {scenario.machine.name}, {scenario.link.name}")
    click.echo(candidates_text(candidates))


def _show_timeline(scenario: Scenario, hosts: int) -> None:
    from cputrain.studies.simulate.output import timeline_svg
    from cputrain.studies.simulate.predict import model_of, scenario_setup

    setup = scenario_setup(scenario, hosts)
    click.echo(timeline_svg(scenario, setup, model_of(scenario).step(setup)))
