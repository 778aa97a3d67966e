"""cputrain plan: Machine -> Plan, printed."""

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cputrain.affinity.errors import InputError, as_option
from cputrain.affinity.planner.plan import Request
from cputrain.affinity.planner.plan_file import read_plan
from cputrain.affinity.planner.request import RESNET50, USUAL_BATCH
from cputrain.affinity.terminal import align_columns, shows_color
from cputrain.affinity.views import plan_differences
from cputrain.cli.completion import complete_recipe
from cputrain.cli.options import PLANNING, SectionedCommand, host_groups_option, planning_options, settings_argument
from cputrain.cli.output import print_file
from cputrain.launch.hosts import allocation_notes, with_allocated_hosts, with_host_groups
from cputrain.launch.options import (
    THIS_MACHINE,
    PlanningOptions,
    network_of,
    network_settings,
    plan_hosts,
    request_of_options,
)
from cputrain.launch.plan_files import FORMATS, cluster_text, formatted, planned_job, start_command, write_plan_files
from cputrain.launch.training_command import training_command
from cputrain.mpi.hosts.groups import Cluster
from cputrain.mpi.hosts.schedulers import allocation
from cputrain.mpi.launchers.launcher import Job

if TYPE_CHECKING:
    from cputrain.recipe.schema import Recipe


SECTIONS = {
    "What to print": ("output_format", "explained", "with_curve", "diff", "machines", "write"),
    **PLANNING,
}
EXAMPLES = (
    "cputrain plan --explain",
    "cputrain plan --machine skx-8160-2s --ppn 4 --comm-cores 2",
    "cputrain plan resnet50-skx-256node --machine skx-8160-2s --nodes 256 --curve",
    "cputrain plan --hostfile hosts --format command",
)


@click.command("plan", cls=SectionedCommand, sections=SECTIONS, examples=EXAMPLES)
@click.argument("recipe", shell_complete=complete_recipe, required=False)
@settings_argument
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", *FORMATS, "command"]),
    default="text",
    show_default=True,
    help="what to print",
)
@click.option("--explain", "explained", is_flag=True, help="add the alternative plans, and the rules' assumptions")
@click.option("--curve", "with_curve", is_flag=True, help="add RECIPE's learning rate as a curve")
@click.option(
    "--diff", nargs=2, type=click.Path(path_type=Path), metavar="A.json B.json", help="compare two saved plans instead"
)
@click.option(
    "--machines",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="plan every machine described in a folder and print a table; exit status 1: one could not be planned",
)
@click.option(
    "--write", type=click.Path(path_type=Path), metavar="DIR", help="write plan.json, hostfile, launch.sh and a picture"
)
@host_groups_option
@planning_options
def plan_command(
    options: PlanningOptions,
    recipe: str | None,
    settings: tuple[str, ...],
    output_format: str,
    explained: bool,
    with_curve: bool,
    diff: tuple[Path, Path] | None,
    machines: Path | None,
    write: Path | None,
    host_groups: tuple[str, ...],
) -> int | None:
    """Show the cores, threads and memory that each worker gets, and why, on this machine or any other.

    With RECIPE (a file or a shipped name) also its batch, steps, learning rate and command line. Where hosts differ,
    each group gets a plan: --host-group 'n[001-128]=skx-8160-2s' --host-group 'k[01-16]=knl-7250-snc4-flat'.
    """
    if diff is not None:
        click.echo("\n".join(plan_differences(*map(read_plan, diff), wording=as_option)) or "the plans are the same")
        return None
    if with_curve and (recipe is None or output_format != "text"):
        raise InputError("--curve draws a recipe's learning rate as text: name a RECIPE, and remove --format")
    base, training = Request(local_batch=USUAL_BATCH, workload=RESNET50), None
    if recipe is not None:
        base, training = _recipe_request(options, recipe, settings)
        options = options.with_given(share=options.given["share"] or training.plan.share)
    if machines is not None:
        return _show_machines(machines, options, base, alone=output_format == "text" and not write and not host_groups)
    env = os.environ
    options = with_host_groups(options, host_groups)
    found = None
    if options.machine == THIS_MACHINE and options.on_this_host:
        found = allocation(env)
        options = with_allocated_hosts(options, found)
    cluster = plan_hosts(options, base, env)
    for note in allocation_notes(options, found, cluster):
        click.echo(f"note: {note}", err=True)
    here = training if options.machine == THIS_MACHINE else None
    job = planned_job(options, cluster, training_command(recipe, settings, here) if recipe else ("CMD...",))
    if write is not None:
        click.echo(write_plan_files(job, options, write, training, env, partial(click.echo, err=True)))
    elif output_format == "command":
        start, hint = start_command(job, options, env)
        print_file(f"{start}\n")
        if hint:
            click.echo(hint, err=True)
    elif output_format in FORMATS:
        print_file(f"{formatted(cluster, output_format)}\n")
    else:
        _show(cluster, job, options, training, env, explained=explained, with_curve=with_curve)
    return None


def _show_machines(folder: Path, options: PlanningOptions, base: Request, *, alone: bool) -> int:
    """Print the table of a folder's machines; 1 where one could not be planned."""
    from cputrain.cli.machines import machine_table, plan_folder

    if not alone or options.machine != "this" or options.given["share"]:
        raise InputError(
            "--machines prints a table of other machines: remove --machine, --share, --host-group, --write and --format"
        )
    rows = plan_folder(folder, request_of_options(options, base))
    click.echo(machine_table(rows))
    return int(any(row.plan is None for row in rows))


def _recipe_request(options: PlanningOptions, recipe: str, settings: tuple[str, ...]) -> "tuple[Request, Recipe]":
    from cputrain.launch.recipe_request import check_local_batch, request_of  # pydantic: only where there is a recipe
    from cputrain.recipe.loading import load_recipe

    check_local_batch(options.given["local_batch"])
    training = load_recipe(recipe, settings)
    return request_of(training), training


def _show(
    cluster: Cluster,
    job: Job,
    options: PlanningOptions,
    recipe: "Recipe | None",
    env: Mapping[str, str],
    *,
    explained: bool,
    with_curve: bool,
) -> None:
    started = start_command(job, options, env) if recipe is not None or len(job.hosts) > 1 else None
    click.echo(cluster_text(cluster, colored=shows_color(sys.stdout, env), explained=explained))
    settings = network_settings(options)
    if settings:
        rows = [(f"  {name}={value}", why) for name, value, why in settings]
        click.echo(f"\nfabric {network_of(options).name}\n{align_columns(rows)}")
    if recipe is not None and len(cluster.groups) == 1:  # its rules count equal hosts
        from cputrain.cli.derived import derivation, precision_lines
        from cputrain.simulate.output import predicted

        click.echo("\n" + derivation(recipe, ppn=job.ppn, nodes=len(job.hosts), with_curve=with_curve))
        for line in predicted(recipe, cluster.groups[0].plan, options, env):
            click.echo(line)
        for line in precision_lines(recipe, cluster.groups[0].plan) if options.machine == "this" else ():
            click.echo(line)
    if started is not None:
        command, hint = started
        click.echo("\n".join(("\ncommand", f"  {command}", *([f"  {hint}"] if hint else []))))
