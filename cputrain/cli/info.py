"""`cputrain recipes`, `keys`, `doctor` and `env`."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from shutil import get_terminal_size
from textwrap import TextWrapper, fill
from typing import Any

import click

from cputrain.affinity.errors import InputError
from cputrain.affinity.kernel.running import Running, comparison, running_processes
from cputrain.affinity.terminal import align_columns
from cputrain.affinity.wording import first_sentence
from cputrain.cli.output import format_option, only_results_on_stdout, print_json
from cputrain.cli.words import WholeSummaries, catalog_group, command_or_list
from cputrain.doctor.host import ERROR, checks_text
from cputrain.recipe.keys import OTHER_NAMES, KeyReference, SectionReference, reference
from cputrain.recipe.loading import ShippedRecipe, recipe_names, shipped_recipe, shipped_recipes

HEAD = ("recipe", "network", "optimizer", "epochs", "what it trains")


@click.group("recipes", cls=catalog_group(recipe_names), invoke_without_command=True)
@format_option
@click.pass_context
def recipes_command(context: click.Context, output_format: str) -> None:
    """List the included recipes, search them, or show one. Without a command: list them; NAME alone shows one,
    TEXT alone searches."""
    if context.invoked_subcommand is None:
        _show(shipped_recipes(), output_format)


@recipes_command.command("list")
@format_option
def list_recipes(output_format: str) -> None:
    """List all of them."""
    _show(shipped_recipes(), output_format)


@recipes_command.command("search")
@click.argument("text")
@format_option
def search(text: str, output_format: str) -> None:
    """List the recipes whose file contains TEXT, in any case: a network, a data set, an author, 32k."""
    found = [
        each
        for each in shipped_recipes()
        if text.lower() in f"{each.name}\n{Path(each.file).read_text(encoding='utf-8')}".lower()
    ]
    if not found:
        raise InputError(f"no shipped recipe contains {text!r}: {command_or_list(text)}")
    _show(found, output_format)


@recipes_command.command("show")
@click.argument("recipe", metavar="NAME")
@format_option
def show(recipe: str, output_format: str) -> None:
    """Print a recipe's file: its source, what was published, the derivation of its numbers, its settings."""
    found = shipped_recipe(recipe)
    text = Path(found.file).read_text(encoding="utf-8")
    if output_format == "json":
        print_json({**asdict(found), "text": text})
    else:
        click.echo(text, nl=False)


def _show(recipes: Sequence[ShippedRecipe], output_format: str) -> None:
    if output_format == "json":
        print_json({"recipes": [asdict(each) for each in recipes]})
        return
    rows = [(each.name, each.network, each.optimizer, str(each.epochs), each.summary) for each in recipes]
    click.echo(align_columns([HEAD, *rows]))
    click.echo("\ncputrain recipes show NAME prints one; cputrain train NAME trains it")


WIDEST = 100


@click.command("keys")
@click.argument("topic", required=False, metavar="[SECTION|KEY|TEXT]")
@format_option
def keys_command(topic: str | None, output_format: str) -> None:
    """Print the manual of recipe keys: the values that each takes, its default, what it does.

    Without an argument: a line for each key. SECTION (optim) and KEY (optim.name) print their whole text; any other
    TEXT is looked for in names and texts, among them the names of other trainers (lr, wd, batch_size).
    """
    sections = reference()
    found = sections if topic is None else matching(sections, topic)
    if not found:
        names = [name for section in sections for name in (section.name, *(key.key for key in section.keys)) if name]
        near = get_close_matches(topic or "", names, n=3, cutoff=0.5)
        hint = f"the nearest are {', '.join(near)}" if near else "cputrain keys prints all of them"
        raise InputError(f"no recipe key, section or text of a key is {topic!r}: {hint}")
    if output_format == "json":
        print_json({"sections": [asdict(section) for section in found]})
    elif topic is None:
        click.echo(index_text(found))
    else:
        click.echo(manual_text(found, min(get_terminal_size().columns, WIDEST)))


def matching(sections: Sequence[SectionReference], topic: str) -> tuple[SectionReference, ...]:
    """The section of this name with those inside it, or the key of this name, or all keys that the topic occurs in."""
    name = topic.strip().removesuffix(".")
    inside = [each for each in sections if each.name == name or each.name.startswith((f"{name}.", f"{name}["))]
    if inside:
        return tuple(inside)
    return (
        _only(sections, lambda key: key.key == name)
        or _only(sections, lambda key: key.key in OTHER_NAMES.get(name.lstrip("-").replace("-", "_"), ()))
        or _only(sections, lambda key: name.lower() in f"{key.key} {key.values} {key.description}".lower())
    )


def _only(sections: Sequence[SectionReference], wanted: Callable[[KeyReference], bool]) -> tuple[SectionReference, ...]:
    """The sections with the wanted keys alone, without those that have none."""
    cut = (replace(section, keys=tuple(filter(wanted, section.keys))) for section in sections)
    return tuple(section for section in cut if section.keys)


def index_text(sections: Sequence[SectionReference]) -> str:
    """A line for each key: its values in short, its default, the first sentence of its text."""
    rows = [("key", "default", "meaning")]
    for section in sections:
        rows += [(key.key, key.default, first_sentence(key.description)) for key in section.keys]
    return align_columns(rows)


def manual_text(sections: Sequence[SectionReference], width: int) -> str:
    """The whole text of each key, in paragraphs of this width under their sections."""
    indented = TextWrapper(width=width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    parts = []
    for section in sections:
        blocks = [fill(f"{section.name or 'Top level'}: {section.description}", width)]
        for key in section.keys:
            blocks.append(
                "\n".join(
                    [
                        f"  {key.key}  (default: {key.default})",
                        indented.fill(f"Values: {key.values}."),
                        indented.fill(key.description),
                    ]
                )
            )
        parts.append("\n\n".join(blocks))
    return "\n\n".join(parts)


DOCTOR_PATIENCE_S = 60.0  # for imports from a slow disk


@click.group("doctor", cls=WholeSummaries, invoke_without_command=True)
@format_option
@click.pass_context
def doctor_command(context: click.Context, output_format: str) -> int:
    """Check this host: processor, clock, memory, limits, /dev/shm, libraries, MPI, network, running processes.

    Each line is ok, a warning (slower or less than possible) or an error (something does not work), with what to do
    about it. The exit status is 1 where there is an error. The commands check one thing thoroughly.
    """
    if context.invoked_subcommand is not None:
        return 0
    from cputrain.doctor.host import host_checks, own_limits, shm_size
    from cputrain.doctor.probe import probed, start_probe
    from cputrain.doctor.software import software_checks

    env = os.environ
    probe = start_probe(env)
    of_host = tuple(host_checks(Path("/"), own_limits(), shm_size()))
    checks = (*of_host, *software_checks(probed(probe, DOCTOR_PATIENCE_S), env))
    status = int(any(check.status == ERROR for check in checks))
    if output_format == "json":
        print_json({"status": status, "checks": [asdict(check) for check in checks]})
    else:
        click.echo(checks_text(checks))
    return status


@doctor_command.command("affinity")
@click.argument("pids", nargs=-1, type=click.IntRange(1), metavar="[PID]...")
@format_option
def affinity(pids: tuple[int, ...], output_format: str) -> int:
    """Compare running processes with their plan: the CPUs of every thread, memory by NUMA node.

    Without PID: every process on this host that a plan has bound. The exit status is 1 if one differs from its plan.
    """
    processes = running_processes(pids)
    if output_format == "json":
        print_json({"processes": list(map(_as_json, processes))})
    else:
        click.echo(comparison(processes))
    return int(any(process.differs for process in processes))


def _as_json(process: Running) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "command": process.command,
        "worker": None if process.worker is None else process.worker.local_rank,
        "planned_cpus": None if process.worker is None else list(process.worker.pus),
        "cpus": sorted({pu for thread in process.threads for pu in thread.pus}),
        "threads": len(process.threads),
        "memory_bytes": {str(node): size for node, size in sorted(process.memory_bytes.items())},
        "misplaced_threads": [{"tid": each.tid, "cpus": list(each.pus)} for each in process.misplaced_threads],
        "remote_bytes": process.remote_bytes,
        "differs": process.differs,
    }


@doctor_command.command("ccl")
@format_option
def ccl(output_format: str) -> None:
    """Find oneCCL, compile its backend if necessary, and time all-reduces over two ranks of this host.

    Both transports, libfabric and MPI, are measured, and the figures kept: where a launcher supports both, the ranks of
    one host then use the faster one. Run this once on a cluster's login host: its jobs then use the compiled backend.
    """
    from statistics import median

    from cputrain.comm.ccl.build import ensure_built
    from cputrain.comm.ccl.check import records_of, time_transports
    from cputrain.comm.ccl.environment import find_libraries
    from cputrain.measurements import TITLES, keep

    env = os.environ
    with only_results_on_stdout(output_format):
        libraries = find_libraries(env)
        version = ".".join(map(str, libraries.version))
        click.echo(f"oneCCL {version}  {libraries.ccl}")
        click.echo(f"Intel MPI     {libraries.mpi}")
        click.echo(f"libfabric     {libraries.fabric}")
        backend = ensure_built(libraries, env)
        click.echo(f"backend       {backend}")
        found, problems = time_transports(libraries, env)
        measured = [
            (transport, size, median(seconds)) for transport, times in found.items() for size, seconds in times.items()
        ]
        for transport, size, seconds in measured:
            figures = f"{size / 1024:>8,.0f} KiB over 2 ranks and {TITLES[transport]:9} {1000 * seconds:8.3f} ms"
            click.echo(f"all-reduce    {figures}")
        for problem in problems:
            click.echo(f"warning: {problem}", err=True)
        for record in records_of(found, command="cputrain doctor ccl"):
            click.echo(f"kept in       {keep(record, env)}")
    if output_format == "json":
        paths = {"oneccl": libraries.ccl, "mpi": libraries.mpi, "fabric": libraries.fabric, "backend": backend}
        print_json(
            {
                "version": version,
                **{name: str(path) for name, path in paths.items()},
                "all_reduce": [dict(zip(("transport", "bytes", "seconds"), each, strict=True)) for each in measured],
                "problems": problems,
            }
        )


ENV_PATIENCE_S = 2.0  # for imports: the command ends within 3 s


@click.command("env")
@format_option
def env_command(output_format: str) -> None:
    """Print what a bug report needs: versions, processor, memory, libraries, the variables that matter.

    It works where torch or torchvision cannot be imported, too, and says what to do about that. Variables whose names
    suggest a secret (TOKEN, PASSWORD, KEY and the like) are listed without their values. `cputrain doctor` checks the
    host.
    """
    from cputrain.doctor.host import facts, facts_text
    from cputrain.doctor.probe import probed, start_probe
    from cputrain.doctor.software import torch_check, torchvision_check

    env = os.environ
    probe = probed(start_probe(env), ENV_PATIENCE_S)
    checks = (torch_check(probe["torch"]), torchvision_check(probe["torchvision"], probe["torch"]))
    found = facts(probe, checks, env)
    if output_format == "json":
        print_json(found)
    else:
        click.echo(facts_text(found))
