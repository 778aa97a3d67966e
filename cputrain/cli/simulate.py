"""cputrain simulate: a recipe's speed on hosts that are not here."""

import os
import re
from itertools import pairwise
from typing import Any

import click

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import counted
from cputrain.cli.completion import complete_machine, complete_recipe
from cputrain.cli.options import settings_argument
from cputrain.cli.output import FiniteRange
from cputrain.mpi.hosts.hostfile import MAX_HOSTS
from cputrain.recipe.loading import load_recipe
from cputrain.simulate.assumptions import LINKED, link_of, published_runs, runs_on
from cputrain.simulate.predict import Row, Scenario, check_global_batch, reference_of, rows_of, started_from
from cputrain.simulate.step import ALGORITHMS, find, unreadable

NUMBERS = re.compile(r"\d{1,6}(,\d{1,6})*(,\.\.\.,\d{1,6})?")
WHAT_IF = {
    "local_batch": "batch.local",
    "compression": "comm.compression",
    "workers": "plan.ppn",
    "comm_cores": "plan.comm_cores",
}
FEW = 2
MOST_ROWS = 1000


@click.command("simulate")
@click.argument("recipe", shell_complete=complete_recipe)
@settings_argument
@click.option(
    "--machine",
    shell_complete=complete_machine,
    default="this",
    metavar="MACHINE",
    show_default=True,
    help="machine, as for `cputrain plan`",
)
@click.option("--nodes", default="1,2,4,...,256", metavar="N,N,...", show_default=True, help="numbers of hosts")
@click.option("--fabric", type=click.Choice(LINKED), default="opa", show_default=True, help="network between the hosts")
@click.option(
    "--rate",
    type=FiniteRange(0, min_open=True),
    metavar="IMG/S",
    help="images/s of one host with this recipe  [default: measured by `bench model`, or published for the processor]",
)
@click.option(
    "--from",
    "start",
    metavar="RUN",
    help="run that gives the processor's speed: a published one by its name, or IMG/S@HOSTSxWORKERSxBATCH with the "
    "workers of a host and a worker's images, as in 6303@64x2x32",
)
@click.option(
    "--bandwidth",
    type=FiniteRange(0.001),
    metavar="GBIT/S",
    help="speed of a host's link  [default: the fabric's]",
)
@click.option(
    "--latency-us",
    type=FiniteRange(0),
    metavar="US",
    help="latency of a message between hosts  [default: the fabric's]",
)
@click.option("--local-batch", type=click.IntRange(1), metavar="N", help="images of a worker's step: batch.local")
@click.option("--compression", type=click.Choice(["none", "bf16"]), help="gradients in transit: comm.compression")
@click.option("--workers", type=click.IntRange(1), metavar="N", help="workers per host: plan.ppn")
@click.option(
    "--comm-cores", type=click.IntRange(0), metavar="N", help="cores of a worker for communication: plan.comm_cores"
)
@click.option(
    "--algorithm", type=click.Choice(ALGORITHMS), help="all-reduce  [default: as oneCCL is set for the fabric]"
)
@click.option("--watts", type=FiniteRange(0, min_open=True), metavar="W", help="power of a host, for the energy")
@click.option("--best", is_flag=True, help="search the plan with the least time to train, for the last number of hosts")
@click.option(
    "--batch-limit",
    type=click.IntRange(1),
    metavar="N",
    help="most images of a step that --best may choose  [default: the recipe's]",
)
@click.option("--explain", "explained", is_flag=True, help="add every assumption with its range and source")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json", "svg", "timeline"]),
    default="text",
    show_default=True,
    help="svg: scaling over hosts; timeline: a step on the last number of hosts, as SVG",
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
    """Predict images/s, efficiency and time to train of RECIPE on many hosts, without them and without its data.

    Starts from a published or measured rate of the processor; the range comes from the assumptions (--explain).
    """
    from cputrain.affinity.planner.records import read_measured, read_records
    from cputrain.affinity.topology.catalog import find_machine
    from cputrain.launch.local import request_of

    counts = numbers_of_hosts(nodes)
    training = load_recipe(recipe, (*settings, *_what_if_settings(settings, what_if)))
    found = find_machine(machine)
    env = os.environ
    records, rates = read_records(found, env), read_measured(found, request_of(training), env)
    for note in (*records.notes, *unreadable(records)):
        click.echo(note, err=True)
    link = link_of(fabric, gbit=bandwidth, latency_us=latency_us)
    if rate is not None and start is not None:
        raise InputError("--rate and --from both give the processor's speed: give one of them")
    scenario = Scenario(
        recipe=training,
        machine=found,
        link=link,
        reference=reference_of(found, training, rate, find(records, training), rates)
        if start is None
        else started_from(start, found, training, link, rates),
        algorithm=algorithm,
        measured=rates,
    )
    check_global_batch(scenario, counts)
    if best:
        _check_best(watts, output_format, explained=explained)
        _show_best(scenario, counts[-1], batch_limit, output_format)
        return
    if batch_limit is not None:
        raise InputError("--batch-limit is for --best: add it")
    if output_format == "timeline":
        _show_timeline(scenario, counts[-1])
        return
    _show_rows(scenario, rows_of(scenario, counts, watts=watts), output_format, explained=explained)


def _check_best(watts: float | None, output_format: str, *, explained: bool) -> None:
    """Raise InputError for an option that --best has no use for."""
    unfit = {
        "--watts": watts is not None,
        "--explain": explained,
        f"--format {output_format}": output_format in ("svg", "timeline"),
    }
    if found := next((name for name, given in unfit.items() if given), None):
        raise InputError(f"--best prints plans as text or JSON: remove {found}")


def _show_rows(scenario: Scenario, rows: tuple[Row, ...], output_format: str, *, explained: bool) -> None:
    from cputrain.simulate.output import assumptions_text, rows_json, rows_text

    if output_format == "json":
        click.echo(rows_json(scenario, rows))
    elif output_format == "svg":
        from cputrain.simulate.output import scaling_svg  # matplotlib: only for pictures

        click.echo(scaling_svg(scenario, rows))
    else:
        reference, link = scenario.reference, scenario.link
        click.echo(
            f"{scenario.recipe.name} on {scenario.machine.name}, {link.name} of {link.nominal_gbit:g} Gbit/s; "
            f"based on {reference.images_per_s:,.4g} images/s on {counted(reference.setup.hosts, 'host')} "
            f"({reference.source})"
        )
        others = [run.name for run in runs_on(scenario.machine.model, scenario.recipe.precision)]
        if reference.source in [run.source for run in published_runs()] and len(others) > 1:
            click.echo(f"other runs to start --from: {', '.join(others)}")
        click.echo(rows_text(rows))
        if explained:
            click.echo("\nassumptions\n" + assumptions_text(scenario))


def numbers_of_hosts(text: str) -> tuple[int, ...]:
    """Numbers of hosts, ascending: "1,2,4", or "1,2,4,...,256", where ... continues doubling or adding.

    Raises InputError where the text is no such list.
    """
    wrong = InputError(f"--nodes {text}: give numbers of hosts, as in 1,8,256 or 1,2,4,...,256")
    if not NUMBERS.fullmatch(text):
        raise wrong
    first, _, last = text.partition(",...,")
    numbers = [int(number) for number in first.split(",")]
    if last:
        if len(numbers) < FEW or numbers[-1] <= numbers[-2] or int(last) <= numbers[-1] or numbers[-2] < 1:
            raise wrong
        if int(last) <= MAX_HOSTS:  # else refused below
            numbers = _continued(numbers, int(last))
        else:
            numbers.append(int(last))
    if not all(1 <= number <= MAX_HOSTS for number in numbers):
        raise InputError(f"--nodes {text}: numbers of hosts are between 1 and {MAX_HOSTS:,}")
    if len(numbers) > MOST_ROWS:
        raise InputError(f"--nodes {text}: more than {MOST_ROWS:,} numbers of hosts: double them, as in 1,2,4,...,4096")
    return tuple(sorted(set(numbers)))


def _continued(numbers: list[int], last: int) -> list[int]:
    """The numbers and their continuation up to `last`: by the same factor, or else by the same difference."""
    factor, rest = divmod(numbers[-1], numbers[-2])
    geometric = rest == 0 and all(b == a * factor for a, b in pairwise(numbers))
    step = numbers[-1] - numbers[-2]
    while (following := numbers[-1] * factor if geometric else numbers[-1] + step) < last:
        if len(numbers) > MOST_ROWS:
            break
        numbers.append(following)
    return [*numbers, last]


def _what_if_settings(settings: tuple[str, ...], what_if: dict[str, Any]) -> tuple[str, ...]:
    """The what-if options as settings of the recipe. Raises InputError where a setting decides the same key."""
    given = {setting.partition("=")[0] for setting in settings}
    found = []
    for name, key in WHAT_IF.items():
        if what_if[name] is None:
            continue
        if key in given:
            raise InputError(f"--{name.replace('_', '-')} and {key}=VALUE say the same: give one of them")
        found.append(f"{key}={what_if[name]}")
    return tuple(found)


def _show_best(scenario: Scenario, hosts: int, batch_limit: int | None, output_format: str) -> None:
    from cputrain.simulate.output import candidates_json, candidates_text
    from cputrain.simulate.predict import best_plan

    found = best_plan(scenario, hosts, batch_limit)
    if output_format == "json":
        click.echo(candidates_json(scenario, found))
        return
    click.echo(f"{scenario.recipe.name} on {counted(hosts, 'host')} of {scenario.machine.name}, {scenario.link.name}")
    click.echo(candidates_text(found))


def _show_timeline(scenario: Scenario, hosts: int) -> None:
    from cputrain.simulate.output import timeline_svg
    from cputrain.simulate.predict import model_of, scenario_setup

    setup = scenario_setup(scenario, hosts)
    click.echo(timeline_svg(scenario, setup, model_of(scenario).step(setup)))
