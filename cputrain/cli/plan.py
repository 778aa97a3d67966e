"""`cputrain plan` prints a plan; `cputrain machine` saves a topology; `cputrain machines` lists the catalog."""

import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cputrain.affinity.errors import InputError, as_option, describe_error, render_message
from cputrain.affinity.filesystem import check_writable
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, Request, plan_machine
from cputrain.affinity.planner.plan_file import read_plan
from cputrain.affinity.planner.workload import RESNET50, USUAL_BATCH
from cputrain.affinity.terminal import align_columns, shows_color
from cputrain.affinity.topology.catalog import (
    catalog_machines,
    described_machines,
    find_machine,
    machine_description,
    machine_names,
    named_machine,
)
from cputrain.affinity.topology.machine import Machine, format_list
from cputrain.affinity.views import plan_differences
from cputrain.affinity.wording import GIB, plural
from cputrain.cli.options import PLANNING, SectionedCommand, host_groups_option, planning_options, settings_argument
from cputrain.cli.output import format_option, formats_option, path_option, print_file, print_json
from cputrain.cli.words import (
    FullSummaryGroup,
    catalog_group,
    command_or_list,
    complete_machine,
    complete_recipe,
    wording_of,
)
from cputrain.launch.options import (
    THIS_MACHINE,
    PlanningOptions,
    allocation_notes,
    network_of,
    network_settings,
    plan_hosts,
    planned_job,
    request_of_options,
    with_allocated_hosts,
    with_host_groups,
)
from cputrain.launch.plan_files import FORMATS, cluster_text, formatted, start_command, write_plan_files
from cputrain.mpi.hostfile import Cluster
from cputrain.mpi.launchers import Job
from cputrain.mpi.schedulers import scheduler_allocation
from cputrain.predict.next_best import compare_plan

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

TABLE_HEAD = ("machine", "sockets", "nodes", "cores", "PUs", "workers x threads", "comm", "loader", "memory")
HEAD = ("machine", "processor", "packages", "NUMA nodes", "cores", "CPUs", "features")


@click.command("plan", cls=SectionedCommand, sections=SECTIONS, examples=EXAMPLES)
@click.argument("recipe", shell_complete=complete_recipe, required=False)
@settings_argument
@formats_option(*FORMATS, "command")
@click.option("--explain", "explained", is_flag=True, help="add the alternative plans and the rules' assumptions")
@click.option("--curve", "with_curve", is_flag=True, help="add RECIPE's learning rate as a curve")
@path_option("--diff", nargs=2, metavar="A.json B.json", help="compare two saved plans instead of planning")
@path_option(
    "--machines",
    metavar="FOLDER",
    help="plan every machine described in FOLDER and print a table; exit with status 1 if one cannot be planned",
)
@path_option("--write", metavar="DIR", help="write plan.json, hostfile, launch.sh and a picture into DIR")
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
    """Show the cores, threads and memory of each worker, with reasons, on this machine or any other.

    RECIPE (a file or a shipped recipe's name) adds batch, steps, learning rate and command line. If hosts differ,
    each group gets its own plan: --host-group 'n[001-128]=skx-8160-2s' --host-group 'k[01-16]=knl-7250-snc4-flat'.
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
    allocation = None
    if options.machine == THIS_MACHINE and options.on_this_host:
        allocation = scheduler_allocation(env)
        options = with_allocated_hosts(options, allocation)
    cluster = plan_hosts(options, base, env)
    for note in allocation_notes(options, allocation, cluster):
        click.echo(f"note: {note}", err=True)
    command: tuple[str, ...] = ("CMD...",)
    if recipe:
        from cputrain.launch.command import training_command  # its supervision code is not needed for a plan alone
        from cputrain.recipe.loading import input_settings  # imports pydantic: only with a recipe

        local = training if options.machine == THIS_MACHINE else None
        command = training_command(recipe, settings, None if local is None else input_settings(local))
    job = planned_job(options, cluster, command)
    derived = None
    if training is not None and len(cluster.groups) == 1:  # the recipe's sizes assume equal hosts
        from cputrain.cli.recipes import derivation

        derived = derivation(training, ppn=job.ppn, nodes=len(job.hosts), with_curve=with_curve)  # in each format
    if write is not None:
        text = None
        if training is not None:
            from cputrain.recipe.loading import dump_recipe

            text = dump_recipe(training.with_absolute_paths())
        click.echo(write_plan_files(job, options, write, text, env, partial(click.echo, err=True)))
    elif output_format == "command":
        start, hint = start_command(job, options, env)
        print_file(f"{start}\n")
        if hint:
            click.echo(hint, err=True)
    elif output_format in FORMATS:
        print_file(f"{formatted(cluster, output_format)}\n")
    else:
        _show(cluster, job, options, training, derived, env, explained=explained)
    return None


def _show_machines(folder: Path, options: PlanningOptions, base: Request, *, alone: bool) -> int:
    """Print a table of the machines described in a folder; return 1 if one cannot be planned, else 0."""

    if not alone or options.machine != "this" or options.given["share"]:
        raise InputError(
            "--machines plans the machines in a folder and prints a table: "
            "remove --machine, --share, --host-group, --write and --format"
        )
    rows = plan_folder(folder, request_of_options(options, base))
    click.echo(machine_table(rows))
    return int(any(row.plan is None for row in rows))


def _recipe_request(options: PlanningOptions, recipe: str, settings: tuple[str, ...]) -> "tuple[Request, Recipe]":
    from cputrain.launch.local import check_local_batch
    from cputrain.recipe.loading import load_recipe  # pydantic: only if there is a recipe
    from cputrain.recipe.request import request_of

    check_local_batch(options.given["local_batch"])
    training = load_recipe(recipe, settings)
    return request_of(training), training


def _show(
    cluster: Cluster,
    job: Job,
    options: PlanningOptions,
    training: "Recipe | None",
    derived: str | None,
    env: Mapping[str, str],
    *,
    explained: bool,
) -> None:
    started = start_command(job, options, env) if training is not None or len(job.hosts) > 1 else None
    lines = [cluster_text(cluster, colored=shows_color(sys.stdout, env), explained=explained)]
    settings = network_settings(options)
    if settings:
        rows = [(f"  {name}={value}", why) for name, value, why in settings]
        lines.append(f"\nfabric {network_of(options).name}\n{align_columns(rows)}")
    if training is not None and derived is not None:
        from cputrain.cli.recipes import precision_lines

        plan = cluster.groups[0].plan
        lines += [f"\n{derived}", *_predicted(training, plan, network_of(options).name, env)]
        lines += precision_lines(training.precision, plan) if options.machine == "this" else ()
    if started is not None:
        command, hint = started
        lines += ["\ncommand", f"  {command}", *([f"  {hint}"] if hint else [])]
    click.echo("\n".join(lines))


def _predicted(training: "Recipe", plan: Plan, fabric: str, env: Mapping[str, str]) -> list[str]:
    """Return the lines of a prediction, of a job of several hosts whose links are known."""
    from cputrain.predict.assumptions import LINKED
    from cputrain.studies.simulate.output import predicted
    from cputrain.studies.simulate.predict import scenario_of_plan

    if plan.request.nodes == 1 or fabric not in LINKED:
        return []
    scenario, notes = scenario_of_plan(training.as_planned(), plan, fabric, env)
    return notes if scenario is None else [*notes, *predicted(scenario, plan.request.nodes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """A described machine by its path in the folder, with its plan or the error that prevents one."""

    name: str
    plan: Plan | None
    error: str | None


def plan_folder(folder: Path, request: Request) -> tuple[MachineRow, ...]:
    """Plan every machine described under a folder. Raises InputError if there is none."""
    return tuple(_plan_row(path, str(path.relative_to(folder)), request) for path in described_machines(folder))


def machine_table(rows: Iterable[MachineRow]) -> str:
    """Format the rows: usable cores and PUs, comm and loader PUs per worker; warnings and errors follow their row,
    indented."""
    rows, wording = tuple(rows), wording_of(["plan"])
    empty = ("-",) * (len(TABLE_HEAD) - 1)
    head, *lines = align_columns(
        [TABLE_HEAD, *((row.name, *(_cells(row.plan) if row.plan else empty)) for row in rows)]
    ).splitlines()
    shown = [head]
    for row, line in zip(rows, lines, strict=True):
        warnings = row.plan.warnings if row.plan else ()
        notes = (
            [f"warning: {render_message(text, wording)}" for text in warnings] if row.plan else [f"error: {row.error}"]
        )
        shown += [line, *(f"  {note}" for note in notes)]
    return "\n".join(shown)


def _plan_row(path: Path, name: str, request: Request) -> MachineRow:
    try:
        plan = plan_machine(find_machine(str(path)), request, Runtime(), compare=compare_plan)
        return MachineRow(name=name, plan=plan, error=None)
    except InputError as error:
        message = describe_error(error, wording_of(["plan"])).replace(str(path), path.name)
        return MachineRow(name=name, plan=None, error=message)


def _cells(plan: Plan) -> tuple[str, ...]:
    machine, cores = plan.machine, plan.machine.allowed_cores
    sizes = Counter(worker.intra_op for worker in plan.workers)
    return (
        str(len({core.package for core in cores})),
        str(len(machine.allowed_nodes)),
        str(len(cores)),
        str(len(machine.allowed_pus)),
        ", ".join(f"{workers} x {threads}" for threads, workers in sorted(sizes.items(), reverse=True)),
        _span(len(worker.comm_pus) for worker in plan.workers),
        _span(len(worker.loader_pus) for worker in plan.workers),
        ", ".join(sorted({worker.memory_policy for worker in plan.workers})),
    )


def _span(counts: Iterable[int]) -> str:
    values = sorted(counts)
    return str(values[0]) if values[0] == values[-1] else f"{values[0]}-{values[-1]}"


@click.group("machine", cls=FullSummaryGroup)
def machine_command() -> None:
    """Save this host's topology, to plan for it elsewhere."""


@machine_command.command("save")
@click.argument("file", required=False, type=click.Path(path_type=Path))
def save(file: Path | None) -> None:
    """Write this host's topology to FILE, a new tarball; by default HOSTNAME.tar.xz in the working directory.

    It contains the small files of /sys and /proc that cputrain and hwloc read: CPUs, caches, NUMA nodes, this process's
    limits, the host name. `cputrain plan --machine FILE` plans for it on any host.
    """
    file = file or Path(f"{platform.node() or 'host'}.tar.xz")
    check_writable(file.parent, "FILE's folder")
    from cputrain.affinity.topology.tarball import save_machine  # imports compressors, which plans do not need

    files = save_machine(Path("/"), file)
    click.echo(f"{file}: {files:,} files; plan with: cputrain plan --machine {file}")


@click.group("machines", cls=catalog_group(machine_names), invoke_without_command=True)
@format_option
@click.pass_context
def machines_command(context: click.Context, output_format: str) -> None:
    """List, search or show the machines that --machine accepts by name. Without a command, list them; a NAME alone is
    shown, any other TEXT is searched for."""
    if context.invoked_subcommand is None:
        _show_listed(catalog_machines(), output_format)


@machines_command.command("list")
@format_option
def list_machines(output_format: str) -> None:
    """List all machines."""
    _show_listed(catalog_machines(), output_format)


@machines_command.command("search")
@click.argument("text")
@format_option
def search(text: str, output_format: str) -> None:
    """List the machines whose name, processor, code name or features contain TEXT (8160, icelake, hbm)."""
    found = [each for each in catalog_machines() if any(_plain(text) in _plain(one) for one in _searched(each))]
    if not found:
        raise InputError(f"no machine in the catalog matches {text!r}: {command_or_list(text)}")
    _show_listed(found, output_format)


@machines_command.command("show")
@click.argument("machine", shell_complete=complete_machine, metavar="NAME")
@format_option
def show(machine: str, output_format: str) -> None:
    """Print a machine's packages, NUMA nodes, memory and processor features."""
    found = named_machine(machine)
    if output_format == "json":
        print_json(_as_json(found))
        return
    nodes = [("NUMA node", "memory", "kind", "CPUs")]
    nodes += [
        (
            str(node.id),
            f"{node.memory_bytes / GIB:g} GiB" + (" (assumed)" if node.memory_assumed else ""),
            node.kind,
            format_list(node.pus) or f"none, next to node {', '.join(map(str, node.near))}",
        )
        for node in found.numa_nodes
    ]
    click.echo(
        f"{found.name}: {found.model} ({', '.join(found.isa)})\n"
        f"{plural(len(found.packages), 'package')}, {plural(len(found.numa_nodes), 'NUMA node')}, "
        f"{plural(len(found.cores), 'core')}, {plural(len(found.pus), 'CPU')}\n\n{align_columns(nodes)}\n\n"
        f"plan with: cputrain plan --machine {found.name}"
    )


def _searched(machine: Machine) -> tuple[str, ...]:
    """Return the searchable texts of a machine; its description may name features it lacks, so only its code name."""
    code_name = re.split(r"[,;:]| with ", machine_description(machine))[0]
    return (machine.name, machine.model, code_name, *machine.isa, *(node.kind for node in machine.numa_nodes))


def _plain(text: str) -> str:
    """Normalize text so that "Ice Lake" and "icelake" are equal."""
    return re.sub(r"[\s_-]", "", text).lower()


def _show_listed(machines: Sequence[Machine], output_format: str) -> None:
    if output_format == "json":
        print_json({"machines": [_as_json(machine) for machine in machines]})
        return
    rows = [
        (
            machine.name,
            machine.model,
            *map(str, (len(machine.packages), len(machine.numa_nodes), len(machine.cores), len(machine.pus))),
            " ".join(machine.isa),
        )
        for machine in machines
    ]
    click.echo(align_columns([HEAD, *rows]))
    click.echo("\nplan for one: cputrain plan --machine NAME; save this host: cputrain machine save")


def _as_json(machine: Machine) -> dict[str, Any]:
    return {
        "name": machine.name,
        "model": machine.model,
        "features": list(machine.isa),
        "packages": len(machine.packages),
        "cores": len(machine.cores),
        "cpus": len(machine.pus),
        "numa_nodes": [
            {
                "id": node.id,
                "kind": node.kind,
                "memory_bytes": node.memory_bytes,
                "memory_assumed": node.memory_assumed,
                "cpus": list(node.pus),
                "near": list(node.near),
            }
            for node in machine.numa_nodes
        ],
    }
