"""cputrain machines: list, search and show the catalog's machines."""

import re
from collections.abc import Sequence
from typing import Any

import click

from affinity.errors import InputError
from affinity.text_table import align_columns
from affinity.topology.catalog import catalog_machines, description_of, machine_names, named_machine
from affinity.topology.cpuset import format_list
from affinity.topology.machine import Machine
from affinity.units import GIB
from affinity.wording import counted
from cputrain.cli.groups import catalog_group, command_or_list
from cputrain.cli.json_output import format_option, print_json

HEAD = ("machine", "processor", "packages", "NUMA nodes", "cores", "CPUs", "features")


@click.group("machines", cls=catalog_group(machine_names), invoke_without_command=True)
@format_option
@click.pass_context
def command(context: click.Context, output_format: str) -> None:
    """List the machines that --machine NAME knows, search them, or show one. Without a command: list them; NAME alone
    shows one, TEXT alone searches."""
    if context.invoked_subcommand is None:
        _show(catalog_machines(), output_format)


@command.command("list")
@format_option
def list_machines(output_format: str) -> None:
    """List all of them."""
    _show(catalog_machines(), output_format)


@command.command("search")
@click.argument("text")
@format_option
def search(text: str, output_format: str) -> None:
    """List the machines whose name, processor, code name or features contain TEXT, in any case: 8160, icelake, hbm."""
    found = [each for each in catalog_machines() if any(_plain(text) in _plain(one) for one in _searched(each))]
    if not found:
        raise InputError(f"no machine of the catalog has {text!r}: {command_or_list(text)}")
    _show(found, output_format)


@command.command("show")
@click.argument("machine", metavar="NAME")
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
