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
from cputrain.affinity.wording import first_named, plural
from cputrain.cli.operators import operators_command
from cputrain.cli.options import settings_argument
from cputrain.cli.output import (
    amount_option,
    format_option,
    formats_option,
    number_option,
    parse_clock,
    path_option,
    print_json,
    show_report,
    shows_bars,
)
from cputrain.cli.words import FullSummaryGroup, complete_recipe
from cputrain.rows import Column, Rows
from cputrain.runs.events import FILE, read_events
from cputrain.studies.tune import AXES, KEYS, Candidates
from cputrain.training.local import PlannedTraining, plan_steps

QUICK_REPEATS, REPEATS = 2, 7
DEFAULT_RECIPE = "imagefolder"
SETTING = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z0-9_]+)*=")
quick_option = click.option("--quick", is_flag=True, help="try the command with tiny sizes; the results are not saved")
figures_option = formats_option("json", "svg", help="choose the output; svg: a picture of the figures")
repeats_option = number_option(
    "--repeats", help=f"measure each figure N times  [default: {REPEATS}, with --quick {QUICK_REPEATS}]"
)

NORMS = (
    Column("layer", itemgetter("layer")),
    Column("|w|", itemgetter("weights"), ".4g"),
    Column("|g|", itemgetter("gradients"), ".4g"),
    Column("|w| / |g|", itemgetter("ratio"), ".4g"),
    Column("trust ratio", itemgetter("trust"), ".4g"),
)

BAR = "{desc} |{bar:20}| {n_fmt}/{total_fmt} trials  {remaining} left"
PLANNED = ("ppn", "threads", "comm_cores", "loader_cores", "smt", "profile")


@click.group("bench", cls=FullSummaryGroup)
def bench_command() -> None:
    """Measure this host: each figure is the median and range of repeats, next to its limit in the same run.

    plan, tune, simulate and oneCCL's start-up use the results until torch, cputrain, oneCCL, Intel MPI, Python or the
    clock governor change. Run nothing else on the host meanwhile.
    """


@bench_command.command("model")
@click.argument("recipe", shell_complete=complete_recipe, default=DEFAULT_RECIPE)
@settings_argument
@number_option("--steps", help="time this many steps  [default: 10]")
@path_option("--trace", metavar="FILE", help="write a trace of two steps for ui.perfetto.dev")
@figures_option
@quick_option
def model(
    recipe: str, settings: tuple[str, ...], steps: int | None, trace: Path | None, quick: bool, output_format: str
) -> None:
    """Train some steps of RECIPE with this host's plan: images/s, the parts of a step, every layer, and the limits.

    Images are generated unless data.path=DIR is given; results with other images are not saved. The limits are the
    speeds of oneDNN's convolutions and matrix products in each precision that the processor has instructions for.
    """
    from cputrain.studies.bench.model import Spec, measure_model, model_records, model_report, precisions, trace_json

    step_count = steps or (2 if quick else 10)
    spec = Spec(
        warm_up=1 if quick else 2, steps=step_count, profiled=2, limits=precisions(this_machine().isa), quick=quick
    )
    env = os.environ
    if SETTING.match(recipe):  # KEY=VALUE without a recipe before it
        recipe, settings = DEFAULT_RECIPE, (recipe, *settings)
    measured = measure_model(recipe, settings, spec, env)
    show_report(model_report(measured), output_format)
    if trace is not None:
        trace.write_text(trace_json(measured.ranks), encoding="utf-8")
        click.echo(f"trace {trace}: open it in ui.perfetto.dev", err=True)
    records = model_records(measured)
    if not records:
        click.echo("not saved: simulate uses only rates of networks that it knows, with generated images", err=True)
    _save(records, env, quick=quick)


@bench_command.command("memory")
@repeats_option
@figures_option
@quick_option
def memory(repeats: int | None, quick: bool, output_format: str) -> None:
    """Measure the bandwidth of each NUMA node by number of threads, counted as STREAM does: copy and triad."""
    from cputrain.studies.bench.limits import bench_memory

    report, records = bench_memory(this_machine(), repeats=_repeats(repeats, quick), quick=quick)
    show_report(report, output_format)
    _save(records, os.environ, quick=quick)


@bench_command.command("data")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@repeats_option
@figures_option
@quick_option
def data(folder: Path | None, repeats: int | None, quick: bool, output_format: str) -> None:
    """Measure how many images/s one core decodes with libjpeg-turbo and Pillow, next to entropy decoding alone.

    The JPEGs come from FOLDER, at most 200, or are generated with ImageNet's mean size.
    """
    from cputrain.studies.bench.limits import bench_decoding

    env = os.environ
    report, records = bench_decoding(this_machine(), folder, env, repeats=_repeats(repeats, quick), quick=quick)
    show_report(report, output_format)
    _save(records, env, quick=quick)


@bench_command.command("comm")
@repeats_option
@figures_option
@quick_option
def comm(repeats: int | None, quick: bool, output_format: str) -> None:
    """Time all-reduces of 1 KiB to 256 MiB between two ranks of this host over gloo and oneCCL, next to a copy.

    GB/s are bus bandwidth: the bytes that each rank sends. alpha and bandwidth are fitted to the medians. If a launcher
    supports both of oneCCL's transports, MPI and libfabric, the ranks of one host use the faster one from then on.
    """
    from cputrain.studies.bench.limits import bench_all_reduce

    env = os.environ
    report, records = bench_all_reduce(this_machine(), env, repeats=_repeats(repeats, quick), quick=quick)
    show_report(report, output_format)
    _save(records, env, quick=quick)


@bench_command.command("optimizer")
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option(
    "--step", type=int, metavar="N", help="print the norms of this step of RUN  [default: the last recorded one]"
)
@repeats_option
@figures_option
@quick_option
def optimizer(run: Path | None, step: int | None, repeats: int | None, quick: bool, output_format: str) -> None:
    """Time optimizer steps on ResNet-50's weights, in GB/s of memory traffic, next to a triad with the same threads.

    With RUN, a run folder, print instead each layer's norms of weights and gradients, their ratio and LARS's trust
    ratio, as recorded by log_norms_every_steps=N. See You et al. 2018, Table 3.
    """
    if run is not None:
        _show_norms(run, step, output_format)
        return
    if step is not None:
        raise InputError("--step selects the norms of a RUN: give its folder")
    from cputrain.studies.bench.limits import bench_optimizer

    show_report(bench_optimizer(this_machine(), repeats=_repeats(repeats, quick), quick=quick), output_format)


bench_command.add_command(operators_command)


def _repeats(requested: int | None, quick: bool) -> int:
    return requested or (QUICK_REPEATS if quick else REPEATS)


def _save(records: Sequence[Any], env: Mapping[str, str], *, quick: bool) -> None:
    """Save the measurements and print the files."""
    from cputrain.measurements import save_measurement

    for path in [] if quick else [save_measurement(record, env) for record in records]:
        click.echo(f"saved in {path}", err=True)


def _show_norms(run: Path, step: int | None, output_format: str) -> None:
    if output_format == "svg":
        raise InputError(f"--format svg is not available for norms: use cputrain report {run} to plot them")
    if not (run / FILE).is_file():
        raise InputError(f"{run} contains no run: give the output folder of a training")
    written = {event["step"]: event for event in read_events(run) if event["event"] == "ratios"}
    if not written:
        raise InputError(f"{run} contains no norms: train with log_norms_every_steps=N")
    chosen = max(written) if step is None else step
    if chosen not in written:
        raise InputError(
            f"{run} contains no norms of step {chosen}: give one of the steps {', '.join(map(str, sorted(written)))}"
        )
    if output_format == "json":
        print_json({key: written[chosen][key] for key in ("step", "rate", "layers")})
        return
    click.echo(f"step {chosen:,}, learning rate {written[chosen]['rate']:g}")
    click.echo(Rows(NORMS, written[chosen]["layers"]).text())


@click.command("tune")
@click.argument("recipe", shell_complete=complete_recipe)
@settings_argument
@click.option(
    "--axes",
    default=",".join(AXES),
    metavar="LIST",
    show_default=True,
    help="vary these settings; keys that the recipe sets stay as they are",
)
@number_option("--steps", default=5, help="time this many steps per trial")
@click.option("--time", "limit", metavar="HH:MM:SS", help="stop after this time, even without a winner")
@amount_option(
    "--resolution",
    least=0.1,
    most=50,
    default=2.0,
    metavar="PERCENT",
    help="ignore differences in speed below this",
)
@click.option(
    "--seed",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="shuffle the order of the trials with this random seed",
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

    Plans take turns in trials of a few training steps; significantly slower ones are dropped until no other plan can be
    the fastest. plan and train then use the result for this recipe's network, precision and batch, unless the recipe
    sets these keys. Finally other local batches and precisions are tried with that plan; as they change what is
    trained, they are only reported. Run nothing else on the host meanwhile.
    """
    from cputrain.measurements import save_measurement
    from cputrain.studies import tune

    varied = tuple(axes.split(","))
    if unknown := [axis for axis in varied if axis not in AXES]:
        raise InputError(f"--axes {unknown[0]!r} is not one of {', '.join(AXES)}: give a comma-separated list")
    env = os.environ
    planned = plan_steps(recipe, settings, env, needs_data=False)
    choices = tune.available_choices(planned, varied, env)
    plans = tune.plans(planned, choices, varied, env)
    if dry_run:
        _list(planned, plans, output_format)
        return
    deadline = None if limit is None else time.monotonic() + parse_clock(limit)
    how = tune.Settings(steps=steps, resolution=resolution / 100, seed=seed, deadline=deadline)
    with _bar("plans") as progress:
        result = tune.race_here(plans, how, env, progress)
    changed = tune.changes(result.winner, choices, varied, env)
    result_of_changes = None
    if len(changed.tried) > 1:
        with _bar("batch and precision") as progress:
            result_of_changes = tune.race_here(changed, how, env, progress)
    if output_format == "json":
        click.echo(tune.result_json(result, result_of_changes))
    else:
        click.echo(tune.result_text(result))
        click.echo(f"\n{result.why}\n{tune.outcome_text(result)}")
        for line in tune.suggestions(result_of_changes):
            click.echo(line)
    described = " ".join(("cputrain tune", recipe, *settings))
    if result.sure and (engine := tune.engine_record(result, described)) is not None:
        click.echo(f"{engine.values['why']}: saved for engine=auto in {save_measurement(engine, env)}", err=True)
    why = _why_not_saved(planned, varied) or ("" if result.sure else "there is no clear winner")
    record = None if why else tune.tuned_record(result, described)
    if record is None:
        why = why or f"the size of {planned.recipe.model.name} is unknown"
        click.echo(f"not saved for plan and train: {why}", err=True)
    else:
        click.echo(f"saved in {save_measurement(record, env)}", err=True)


def _list(planned: PlannedTraining, plans: Candidates, output_format: str) -> None:
    """Print the plans that a tuning run would try."""
    recipe = planned.recipe
    if output_format == "json":
        tried = [
            {"name": candidate.name, "settings": {KEYS[a]: value for a, value in candidate.values}}
            for candidate in plans.tried
        ]
        refused = [{"values": dict(values), "why": why} for values, why in plans.refused]
        print_json({"recipe": recipe.name, "data": recipe.data.path, "plans": tried, "refused": refused})
        return
    data = "generated images" if recipe.data.generated else f"the images of {recipe.data.path}"
    click.echo(f"{recipe.name}: {plural(len(plans.tried), 'plan')} to try, with {data}")
    for candidate in plans.tried:
        click.echo(f"  {candidate.name:<32} {' '.join(candidate.settings)}")
    for values, why in plans.refused:
        click.echo(f"  not {', '.join(f'{axis} {value}' for axis, value in values)}: {why}")


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr; yields a callback for the trials done and the estimated trials left."""
    bar: Any = tqdm(
        desc=title, total=1, file=sys.stderr, bar_format=BAR, leave=False, mininterval=0, disable=not shows_bars()
    )

    def show(done: int, left: int) -> None:
        bar.total = done + left
        bar.update(done - bar.n)
        bar.refresh()

    with bar:
        yield show


def _why_not_saved(planned: PlannedTraining, varied: tuple[str, ...]) -> str:
    """Return why the result is not valid for other trainings; "" if it is."""
    fixed = [f"plan.{name}" for name in PLANNED if getattr(planned.recipe.plan, name) != "auto"]
    if fixed:
        return f"the recipe sets {first_named(fixed)}"
    return "" if "workers" in varied else "the numbers of workers were not varied"
