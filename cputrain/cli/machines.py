"""`cputrain machine` and `cputrain machines`: save, list and plan machines."""

import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cputrain.affinity.errors import InputError, describe, worded
from cputrain.affinity.filesystem import check_writable
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, Request, plan_machine
from cputrain.affinity.terminal import align_columns
from cputrain.affinity.topology.archive import save_machine
from cputrain.affinity.topology.catalog import (
    catalog_machines,
    described_machines,
    description_of,
    find_machine,
    machine_names,
    named_machine,
)
from cputrain.affinity.topology.machine import Machine, format_list
from cputrain.affinity.wording import GIB, counted
from cputrain.cli.completion import complete_machine
from cputrain.cli.output import format_option, print_json
from cputrain.cli.words import WholeSummaries, catalog_group, command_or_list, wording_of

TABLE_HEAD = ("machine", "sockets", "nodes", "cores", "PUs", "workers x threads", "comm", "loader", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """A description, by its path in the folder; its plan, or why there is none."""

    name: str
    plan: Plan | None
    error: str | None


def plan_folder(folder: Path, request: Request) -> tuple[MachineRow, ...]:
    """Plan every machine that is described under a folder. Raises InputError where there is none."""
    return tuple(_planned(path, str(path.relative_to(folder)), request) for path in described_machines(folder))


def machine_table(rows: Iterable[MachineRow]) -> str:
    """Cores and PUs are those that may be used, comm and loader count PUs of a worker; warnings and errors follow their
    row, indented."""
    rows, wording = tuple(rows), wording_of(["plan"])
    empty = ("-",) * (len(TABLE_HEAD) - 1)
    head, *lines = align_columns(
        [TABLE_HEAD, *((row.name, *(_cells(row.plan) if row.plan else empty)) for row in rows)]
    ).splitlines()
    shown = [head]
    for row, line in zip(rows, lines, strict=True):
        warnings = row.plan.warnings if row.plan else ()
        notes = [f"warning: {worded(text, wording)}" for text in warnings] if row.plan else [f"error: {row.error}"]
        shown += [line, *(f"  {note}" for note in notes)]
    return "\n".join(shown)


def _planned(path: Path, name: str, request: Request) -> MachineRow:
    try:
        return MachineRow(name=name, plan=plan_machine(find_machine(str(path)), request, Runtime()), error=None)
    except InputError as error:
        message = describe(error, wording_of(["plan"])).replace(str(path), path.name)
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
    found = sorted(counts)
    return str(found[0]) if found[0] == found[-1] else f"{found[0]}-{found[-1]}"


@click.group("machine", cls=WholeSummaries)
def machine_command() -> None:
    """Save a host's topology, so that others can plan for it."""


@machine_command.command("save")
@click.argument("file", required=False, type=click.Path(path_type=Path))
def save(file: Path | None) -> None:
    """Write this host's topology into FILE, a new tarball; by default HOSTNAME.tar.xz in this folder.

    It contains the small files of /sys and /proc that cputrain and hwloc read: CPUs, caches, NUMA nodes, the limits of
    this process, the host's name. `cputrain plan --machine FILE` plans for it anywhere.
    """
    file = file or Path(f"{platform.node() or 'host'}.tar.xz")
    check_writable(file.parent, "FILE's folder")
    files = save_machine(Path("/"), file)
    click.echo(f"{file}: {files:,} files; plan with: cputrain plan --machine {file}")


HEAD = ("machine", "processor", "packages", "NUMA nodes", "cores", "CPUs", "features")


@click.group("machines", cls=catalog_group(machine_names), invoke_without_command=True)
@format_option
@click.pass_context
def machines_command(context: click.Context, output_format: str) -> None:
    """List the machines that --machine NAME knows, search them, or show one. Without a command: list them; NAME alone
    shows one, TEXT alone searches."""
    if context.invoked_subcommand is None:
        _show(catalog_machines(), output_format)


@machines_command.command("list")
@format_option
def list_machines(output_format: str) -> None:
    """List all of them."""
    _show(catalog_machines(), output_format)


@machines_command.command("search")
@click.argument("text")
@format_option
def search(text: str, output_format: str) -> None:
    """List the machines whose name, processor, code name or features contain TEXT, in any case: 8160, icelake, hbm."""
    found = [each for each in catalog_machines() if any(_plain(text) in _plain(one) for one in _searched(each))]
    if not found:
        raise InputError(f"no machine of the catalog has {text!r}: {command_or_list(text)}")
    _show(found, output_format)


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
        f"{counted(len(found.packages), 'package')}, {counted(len(found.numa_nodes), 'NUMA node')}, "
        f"{counted(len(found.cores), 'core')}, {counted(len(found.pus), 'CPU')}\n\n{align_columns(nodes)}\n\n"
        f"plan with: cputrain plan --machine {found.name}"
    )


def _searched(machine: Machine) -> tuple[str, ...]:
    """What a machine is found by; of its description only the code name, as the rest may say what it lacks."""
    code_name = re.split(r"[,;:]| with ", description_of(machine))[0]
    return (machine.name, machine.model, code_name, *machine.isa, *(node.kind for node in machine.numa_nodes))


def _plain(text: str) -> str:
    """Text in which Ice Lake and icelake are the same."""
    return re.sub(r"[\s_-]", "", text).lower()


def _show(machines: Sequence[Machine], output_format: str) -> None:
    if output_format == "json":
        print_json({"machines": [_as_json(each) for each in machines]})
        return
    rows = [
        (
            each.name,
            each.model,
            *map(str, (len(each.packages), len(each.numa_nodes), len(each.cores), len(each.pus))),
            " ".join(each.isa),
        )
        for each in machines
    ]
    click.echo(align_columns([HEAD, *rows]))
    click.echo("\ncputrain plan --machine NAME plans for one; cputrain machine save writes that of this host")


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
