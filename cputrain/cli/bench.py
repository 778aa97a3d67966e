"""`cputrain bench` and `cputrain tune`."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from cputrain.affinity.errors import InputError
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import counted, first_named
from cputrain.bench.figures import Report
from cputrain.cli.options import settings_argument
from cputrain.cli.output import (
    amount_option,
    format_option,
    formats_option,
    number_option,
    parse_clock,
    path_option,
    print_json,
    shows_bars,
)
from cputrain.cli.words import WholeSummaries, complete_recipe
from cputrain.launch.local import PlannedTraining, plan_training
from cputrain.rows import Column, Rows
from cputrain.runs.events import FILE, read_events
from cputrain.tune import AXES, KEYS, Candidates

QUICK_REPEATS, REPEATS = 2, 7
DEFAULT_RECIPE = "imagefolder"
SETTING = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z0-9_]+)*=")


@click.group("bench", cls=WholeSummaries)
def bench_command() -> None:
    """Measure this host: each figure is the median of repeats, with their range, beside its limit in the same run.

    plan, tune, simulate and oneCCL's start use the results until torch, cputrain, oneCCL, Intel MPI, Python or the
    clock governor change. Measure where nothing else runs.
    """


quick_option = click.option(
    "--quick", is_flag=True, help="tiny sizes, to try the command out; the results are not kept"
)
figures_option = formats_option("json", "svg", help="svg: a picture of the figures")
repeats_option = number_option(
    "--repeats", help=f"measurements of each figure  [default: {REPEATS}, with --quick {QUICK_REPEATS}]"
)


@bench_command.command("model")
@click.argument("recipe", shell_complete=complete_recipe, default=DEFAULT_RECIPE)
@settings_argument
@number_option("--steps", help="steps that are counted  [default: 10]")
@path_option("--trace", metavar="FILE", help="write two steps for ui.perfetto.dev")
@figures_option
@quick_option
def model(
    recipe: str, settings: tuple[str, ...], steps: int | None, trace: Path | None, quick: bool, output_format: str
) -> None:
    """Train some steps of RECIPE under this host's plan: images/s, the parts of a step, every layer, and the limits.

    Images are generated, unless data.path=DIR is given; measurements with other images are not kept. The limits are
    oneDNN's convolutions and matrix products in the precisions that the processor has instructions for.
    """
    from cputrain.bench.model import Spec, measure_model, model_records, model_report, precisions, trace_json

    counted = steps or (2 if quick else 10)
    spec = Spec(
        warm_up=1 if quick else 2, steps=counted, profiled=2, limits=precisions(this_machine().isa), quick=quick
    )
    env = os.environ
    if SETTING.match(recipe):  # KEY=VALUE without a recipe before it
        recipe, settings = DEFAULT_RECIPE, (recipe, *settings)
    found = measure_model(recipe, settings, spec, env)
    _show(model_report(found), output_format)
    if trace is not None:
        trace.write_text(trace_json(found.ranks), encoding="utf-8")
        click.echo(f"trace {trace}: open it in ui.perfetto.dev", err=True)
    records = model_records(found)
    if not records:
        click.echo("not kept: simulate uses only rates with generated images, of networks that it knows", err=True)
    _keep(records, env, quick=quick)


@bench_command.command("memory")
@repeats_option
@figures_option
@quick_option
def memory(repeats: int | None, quick: bool, output_format: str) -> None:
    """Bandwidth of each NUMA node by the number of threads, counted as STREAM does: copy and triad."""
    from cputrain.bench.limits import bench_memory

    report, records = bench_memory(this_machine(), repeats=_repeats(repeats, quick), quick=quick)
    _show(report, output_format)
    _keep(records, os.environ, quick=quick)


@bench_command.command("data")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@repeats_option
@figures_option
@quick_option
def data(folder: Path | None, repeats: int | None, quick: bool, output_format: str) -> None:
    """Images/s that one core decodes, by libjpeg-turbo and by Pillow, beside entropy decoding alone.

    The JPEGs are those of FOLDER, 200 at most, or generated ones of ImageNet's mean size.
    """
    from cputrain.bench.limits import bench_decoding

    env = os.environ
    report, records = bench_decoding(this_machine(), folder, env, repeats=_repeats(repeats, quick), quick=quick)
    _show(report, output_format)
    _keep(records, env, quick=quick)


@bench_command.command("comm")
@repeats_option
@figures_option
@quick_option
def comm(repeats: int | None, quick: bool, output_format: str) -> None:
    """All-reduces of 1 KiB to 256 MiB between two ranks of this host, over gloo and oneCCL, beside a copy.

    GB/s are those of the bus: the bytes that each rank sends. alpha and bandwidth are fitted to the medians. Where a
    launcher supports both of oneCCL's transports, MPI and libfabric, the ranks of one host then use the faster one.
    """
    from cputrain.bench.limits import bench_all_reduce

    env = os.environ
    report, records = bench_all_reduce(this_machine(), env, repeats=_repeats(repeats, quick), quick=quick)
    _show(report, output_format)
    _keep(records, env, quick=quick)


@bench_command.command("optimizer")
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--step", type=int, metavar="N", help="step of RUN to print  [default: the last recorded one]")
@repeats_option
@figures_option
@quick_option
def optimizer(run: Path | None, step: int | None, repeats: int | None, quick: bool, output_format: str) -> None:
    """Optimizer steps on ResNet-50's weights, in GB/s that they move, beside a triad on as many threads.

    With RUN, a run's folder, instead each layer's norms of weights and gradients, their ratio, and LARS' trust ratio,
    as the run has recorded them with log_norms_every_steps=N. See You et al. 2018, Table 3.
    """
    if run is not None:
        _show_norms(run, step, output_format)
        return
    if step is not None:
        raise InputError("--step is for the norms of a RUN: name its folder")
    from cputrain.bench.limits import bench_optimizer

    _show(bench_optimizer(this_machine(), repeats=_repeats(repeats, quick), quick=quick), output_format)


def _repeats(requested: int | None, quick: bool) -> int:
    return requested or (QUICK_REPEATS if quick else REPEATS)


def _show(report: Report, output_format: str) -> None:
    """Print a report."""
    from cputrain.affinity.planner.records import current_versions, machine_name
    from cputrain.bench.figures import report_json, report_svg, report_text

    if output_format == "json":
        click.echo(report_json(report, machine=machine_name(this_machine()), versions=current_versions()))
    elif output_format == "svg":
        click.echo(report_svg(report))
    else:
        click.echo(report_text(report))


def _keep(records: Sequence[Any], env: Mapping[str, str], *, quick: bool) -> None:
    """Keep what was measured, and tell where."""
    from cputrain.measurements import keep

    for path in [] if quick else [keep(record, env) for record in records]:
        click.echo(f"kept in {path}", err=True)


NORMS = (
    Column("layer", itemgetter("layer")),
    Column("|w|", itemgetter("weights"), ".4g"),
    Column("|g|", itemgetter("gradients"), ".4g"),
    Column("|w| / |g|", itemgetter("ratio"), ".4g"),
    Column("trust ratio", itemgetter("trust"), ".4g"),
)


def _show_norms(run: Path, step: int | None, output_format: str) -> None:
    if output_format == "svg":
        raise InputError(f"--format svg: norms are a table: cputrain report {run} draws them")
    if not (run / FILE).is_file():
        raise InputError(f"{run} contains no run: give a run's output folder")
    written = {event["step"]: event for event in read_events(run) if event["event"] == "ratios"}
    if not written:
        raise InputError(f"{run} has recorded no norms: train with log_norms_every_steps=N")
    chosen = max(written) if step is None else step
    if chosen not in written:
        raise InputError(
            f"{run} has recorded no norms at step {chosen}: its steps are {', '.join(map(str, sorted(written)))}"
        )
    if output_format == "json":
        print_json({key: written[chosen][key] for key in ("step", "rate", "layers")})
        return
    click.echo(f"step {chosen:,}, learning rate {written[chosen]['rate']:g}")
    click.echo(Rows(NORMS, written[chosen]["layers"]).text())


BAR = "{desc} |{bar:20}| {n_fmt}/{total_fmt} trials  {remaining} left"
PLANNED = ("ppn", "threads", "comm_cores", "loader_cores", "smt", "profile")


@click.command("tune")
@click.argument("recipe", shell_complete=complete_recipe)
@settings_argument
@click.option(
    "--axes",
    default=",".join(AXES),
    metavar="LIST",
    show_default=True,
    help="what to vary; keys that the recipe sets are kept",
)
@number_option("--steps", default=5, help="steps of a trial that count")
@click.option("--time", "limit", metavar="HH:MM:SS", help="stop after this time, even without a winner")
@amount_option(
    "--resolution",
    least=0.1,
    most=50,
    default=2.0,
    metavar="PERCENT",
    help="a difference in speed that does not matter",
)
@click.option(
    "--seed", type=int, default=1, show_default=True, metavar="N", help="random seed for the order of the trials"
)
@click.option("--dry-run", is_flag=True, help="list the plans that would be tried; start nothing")
@format_option
def tune_command(
    recipe: str,
    settings: tuple[str, ...],
    axes: str,
    steps: int,
    limit: str | None,
    resolution: float,
    seed: int,
    dry_run: bool,
    output_format: str,
) -> None:
    """Find the fastest plan for RECIPE on this machine: workers, comm and loader cores, allocator, engine.

    Trials are some steps of the training, in turns; plans that are surely slower are dropped, until no other can be the
    fastest. plan and train then use the result for this recipe's network, precision and batch, where the recipe leaves
    a choice. Last, other local batches and precisions are tried with that plan: they change what is trained, and are
    only reported. Measure where nothing else runs.
    """
    from cputrain import tune
    from cputrain.measurements import keep

    varied = tuple(axes.split(","))
    if unknown := [axis for axis in varied if axis not in AXES]:
        raise InputError(f"--axes {unknown[0]!r} is none of {', '.join(AXES)}: name some of them, separated by commas")
    env = os.environ
    own = plan_training(tune.tuned_recipe(recipe, settings), env)
    choices = tune.choices_here(own, varied, env)
    plans = tune.plans(own, choices, varied, env)
    if dry_run:
        _list(own, plans, output_format)
        return
    deadline = None if limit is None else time.monotonic() + parse_clock(limit)
    how = tune.Settings(steps=steps, resolution=resolution / 100, seed=seed, deadline=deadline)
    with _bar("plans") as progress:
        found = tune.race_here(plans, how, env, progress)
    changed = tune.changes(found.winner, choices, varied, env)
    others = None
    if len(changed.tried) > 1:
        with _bar("batch and precision") as progress:
            others = tune.race_here(changed, how, env, progress)
    if output_format == "json":
        click.echo(tune.result_json(found, others))
    else:
        click.echo(tune.result_text(found))
        click.echo(f"\n{found.why}\n{tune.outcome_text(found)}")
        for line in tune.suggestions(others):
            click.echo(line)
    described = " ".join(("cputrain tune", recipe, *settings))
    if found.sure and (engine := tune.engine_record(found, described)) is not None:
        click.echo(f"{engine.values['why']}: kept for engine=auto in {keep(engine, env)}", err=True)
    why = _not_kept(own, varied) or ("" if found.sure else "it is not decided")
    record = None if why else tune.tuned_record(found, described)
    if record is None:
        why = why or f"the size of {own.recipe.model.name} is not known"
        click.echo(f"not kept for plan and train: {why}", err=True)
    else:
        click.echo(f"kept in {keep(record, env)}", err=True)


def _list(own: PlannedTraining, plans: Candidates, output_format: str) -> None:
    """Print what a dry run would try."""
    recipe = own.recipe
    if output_format == "json":
        tried = [{"name": each.name, "settings": {KEYS[a]: value for a, value in each.values}} for each in plans.tried]
        refused = [{"values": dict(values), "why": why} for values, why in plans.refused]
        print_json({"recipe": recipe.name, "data": recipe.data.path, "plans": tried, "refused": refused})
        return
    data = "generated images" if recipe.data.generated else f"the images of {recipe.data.path}"
    click.echo(f"{recipe.name}: {counted(len(plans.tried), 'plan')} to try, with {data}")
    for candidate in plans.tried:
        click.echo(f"  {candidate.name:<32} {' '.join(candidate.settings)}")
    for values, why in plans.refused:
        click.echo(f"  not {', '.join(f'{axis} {value}' for axis, value in values)}: {why}")


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of the trials, on stderr; yields what to tell it: trials that are done, and left by estimate."""
    bar: Any = tqdm(
        desc=title, total=1, file=sys.stderr, bar_format=BAR, leave=False, mininterval=0, disable=not shows_bars()
    )

    def show(done: int, left: int) -> None:
        bar.total = done + left
        bar.update(done - bar.n)
        bar.refresh()

    with bar:
        yield show


def _not_kept(own: PlannedTraining, varied: tuple[str, ...]) -> str:
    """Why the result does not hold for every such training; "" where it does."""
    fixed = [f"plan.{name}" for name in PLANNED if getattr(own.recipe.plan, name) != "auto"]
    if fixed:
        return f"the recipe sets {first_named(fixed)}"
    return "" if "workers" in varied else "the numbers of workers were not varied"
