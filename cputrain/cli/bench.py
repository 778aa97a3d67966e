"""cputrain bench: measurements of this host, each beside its limit; and norms that a run has recorded."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from affinity.errors import InputError
from affinity.text_table import align_columns
from affinity.topology.sysfs import this_machine
from cputrain.bench.figures import Report
from cputrain.cli.groups import WholeSummaries
from cputrain.cli.json_output import print_json
from cputrain.cli.options import settings_argument
from cputrain.runs.events import FILE, read_events

F = TypeVar("F", bound=Callable[..., Any])
QUICK_REPEATS, REPEATS = 2, 7
DEFAULT_RECIPE = "imagefolder"
SETTING = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z0-9_]+)*=")


@click.group("bench", cls=WholeSummaries)
def command() -> None:
    """Measure this host: each figure is the median of repeats, with their range, beside its limit in the same run.

    plan, tune, simulate and oneCCL's start use the results until torch, cputrain, oneCCL, Intel MPI, Python or the
    clock governor change. Measure where nothing else runs.
    """


def _output_options(function: F) -> F:
    """Add --format and --quick."""
    quick = click.option("--quick", is_flag=True, help="tiny sizes, to try the command out; the results are not kept")
    formats = click.option(
        "--format",
        "output_format",
        type=click.Choice(["text", "json", "svg"]),
        default="text",
        show_default=True,
        help="svg: a picture of the figures",
    )
    return formats(quick(function))


def _repeats_option(function: F) -> F:
    """Add --repeats."""
    return click.option(
        "--repeats",
        type=click.IntRange(1),
        metavar="N",
        help=f"measurements of each figure  [default: {REPEATS}, with --quick {QUICK_REPEATS}]",
    )(function)


@command.command("model")
@click.argument("recipe", default=DEFAULT_RECIPE)
@settings_argument
@click.option("--steps", type=click.IntRange(1), metavar="N", help="steps that are counted  [default: 10]")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="write two steps for ui.perfetto.dev")
@_output_options
def model(
    recipe: str, settings: tuple[str, ...], steps: int | None, trace: Path | None, quick: bool, output_format: str
) -> None:
    """Train some steps of RECIPE under this host's plan: images/s, the parts of a step, every layer, and the limits.

    Images are generated, unless data.path=DIR is given; measurements with other images are not kept. The limits are
    oneDNN's convolutions and matrix products in the precisions that the processor has instructions for.
    """
    from cputrain.bench.model import measure_model, model_records, model_report
    from cputrain.bench.model_rank import Spec, precisions
    from cputrain.bench.trace import trace_json

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


@command.command("memory")
@_repeats_option
@_output_options
def memory(repeats: int | None, quick: bool, output_format: str) -> None:
    """Bandwidth of each NUMA node by the number of threads, counted as STREAM does: copy and triad."""
    from cputrain.bench.memory import bench_memory

    report, records = bench_memory(this_machine(), repeats=_repeats(repeats, quick), quick=quick)
    _show(report, output_format)
    _keep(records, os.environ, quick=quick)


@command.command("data")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@_repeats_option
@_output_options
def data(folder: Path | None, repeats: int | None, quick: bool, output_format: str) -> None:
    """Images/s that one core decodes, by libjpeg-turbo and by Pillow, beside entropy decoding alone.

    The JPEGs are those of FOLDER, 200 at most, or generated ones of ImageNet's mean size.
    """
    from cputrain.bench.decoding import bench_decoding

    env = os.environ
    report, records = bench_decoding(this_machine(), folder, env, repeats=_repeats(repeats, quick), quick=quick)
    _show(report, output_format)
    _keep(records, env, quick=quick)


@command.command("comm")
@_repeats_option
@_output_options
def comm(repeats: int | None, quick: bool, output_format: str) -> None:
    """All-reduces of 1 KiB to 256 MiB between two ranks of this host, over gloo and oneCCL, beside a copy.

    GB/s are those of the bus: the bytes that each rank sends. alpha and bandwidth are fitted to the medians. Where a
    launcher supports both of oneCCL's transports, MPI and libfabric, the ranks of one host then use the faster one.
    """
    from cputrain.bench.all_reduce import bench_all_reduce

    env = os.environ
    report, records = bench_all_reduce(this_machine(), env, repeats=_repeats(repeats, quick), quick=quick)
    _show(report, output_format)
    _keep(records, env, quick=quick)


@command.command("optimizer")
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--step", type=int, metavar="N", help="step of RUN to print  [default: the last recorded one]")
@_repeats_option
@_output_options
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
    from cputrain.bench.optimizer import bench_optimizer

    _show(bench_optimizer(this_machine(), repeats=_repeats(repeats, quick), quick=quick), output_format)


def _repeats(requested: int | None, quick: bool) -> int:
    return requested or (QUICK_REPEATS if quick else REPEATS)


def _show(report: Report, output_format: str) -> None:
    """Print a report."""
    from affinity.planner.records import current_versions, machine_name
    from cputrain.bench.figures import report_json, report_text

    if output_format == "json":
        click.echo(report_json(report, machine=machine_name(this_machine()), versions=current_versions()))
    elif output_format == "svg":
        from cputrain.bench.pictures import report_svg  # matplotlib: only for pictures

        click.echo(report_svg(report))
    else:
        click.echo(report_text(report))


def _keep(records: Sequence[Any], env: Mapping[str, str], *, quick: bool) -> None:
    """Keep what was measured, and tell where."""
    from cputrain.measurements import keep

    for path in [] if quick else [keep(record, env) for record in records]:
        click.echo(f"kept in {path}", err=True)


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
    click.echo(
        align_columns(
            [("layer", "|w|", "|g|", "|w| / |g|", "trust ratio"), *map(_row, written[chosen]["layers"])], numbers=True
        )
    )


def _row(layer: dict[str, Any]) -> tuple[str, ...]:
    values = (layer[key] for key in ("weights", "gradients", "ratio", "trust"))
    return (layer["layer"], *("" if value is None else f"{value:.4g}" for value in values))
