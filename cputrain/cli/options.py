"""click options shared by the planning commands, and their sections in --help."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.request import (
    COUNT,
    CPUS,
    FLAG,
    NETWORK,
    NUMBER,
    OPTIONS,
    RUNTIME,
    SPEED,
    WORKERS,
    Option,
)
from cputrain.affinity.topology.machine import parse_list
from cputrain.cli.output import FiniteRange, number_option, path_option
from cputrain.cli.words import complete_machine, complete_setting, refuse_options_as_keys
from cputrain.launch.options import PlanningOptions, requested_hosts, workers_per_host
from cputrain.mpi.fabric import FABRICS
from cputrain.mpi.launchers import LAUNCHERS
from cputrain.mpi.schedulers import scheduler_allocation

OTHER = "Other options"
# Parameter names of the planning options, by section of --help.
HOST_FIELDS = ("machine", "hosts", "hostfile", "nodes", "host_groups")
PLANNING = {
    "Hosts": HOST_FIELDS,
    WORKERS: ("ranks", *(option.name for option in OPTIONS if option.section == WORKERS)),
    RUNTIME: (*(option.name for option in OPTIONS if option.section == RUNTIME), "pin_threads", "keep_env"),
    NETWORK: ("launcher", "bind", "fabric", *(option.name for option in OPTIONS if option.section == NETWORK)),
}

# Spellings of torchrun, ipexrun, mpirun and horovodrun that are accepted as synonyms; --help leaves them out.
OTHER_NAMES = {
    "ppn": (
        *("--nproc-per-node", "--nproc_per_node", "--nprocs-per-node", "--nprocs_per_node"),
        *("-ppn", "-perhost", "--npernode", "-npernode", "--ntasks-per-node"),
    ),
    "nodes": ("--nnodes", "--num-nodes", "--num_nodes"),
    "hosts": ("-H", "-hosts", "-host", "--host"),
    "hostfile": ("-f", "-hostfile", "-machinefile", "--machinefile"),
}

DIGITS = re.compile("[0-9]{1,6}")
F = TypeVar("F", bound=Callable[..., Any])
LAUNCHER_NAMES = ["auto", "local", *LAUNCHERS]
host_groups_option = click.option(
    "--host-group",
    "host_groups",
    multiple=True,
    metavar="HOSTS=MACHINE",
    help="plan these hosts as MACHINE, as in 'n[001-128]=skx-8160-2s'; repeatable, once per group of equal hosts",
)
# KEY=VALUE arguments that override keys of the recipe.
settings_argument = click.argument(
    "settings", shell_complete=complete_setting, nargs=-1, callback=refuse_options_as_keys, metavar="[KEY=VALUE]..."
)
no_verify_option = click.option(
    "--no-verify", is_flag=True, help="continue even if the kernel gave a worker other CPUs or memory than planned"
)
restarts_option = click.option(
    "--restarts",
    type=click.IntRange(0, 1000),
    default=0,
    metavar="N",
    help="restart after a failure, at most N times",
)


class SectionedCommand(click.Command):
    """A command whose --help lists options by section: `sections` maps a title to parameter names, other options come
    last, or alone without sections. `examples` are command lines shown at the end."""

    def __init__(
        self,
        *arguments: Any,
        sections: Mapping[str, Sequence[str]],
        examples: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.sections, self.examples = sections, examples

    def options_by_section(self, ctx: click.Context) -> Iterator[tuple[str, list[click.Option]]]:
        """Yield each section that has options, with its options in the listed order."""
        options = {param.name: param for param in self.get_params(ctx) if isinstance(param, click.Option)}
        for title, names in self.sections.items():
            found = [options.pop(name) for name in names if name in options]
            if found:
                yield title, list(found)
        yield OTHER if self.sections else "Options", list(options.values())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by section."""
        for title, options in self.options_by_section(ctx):
            records = [record for option in options if (record := option.get_help_record(ctx))]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example command lines."""
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"{' ' * formatter.current_indent}{line}\n" for line in self.examples))


class PlanningOption(click.Option):
    """An option that also accepts its synonyms in OTHER_NAMES."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Register the synonyms with the parser; help and error messages show only cputrain's names."""
        ours, self.opts = self.opts, [*self.opts, *OTHER_NAMES.get(self.name or "", ())]
        super().add_to_parser(parser, ctx)
        self.opts = ours

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """Accept -n=2 as -n 2, as other launchers do: click leaves the "=" in a short option's value."""
        return super().process_value(ctx, value.removeprefix("=") if isinstance(value, str) else value)


class WordOrNumber(click.ParamType):  # type: ignore[type-arg]  # generic in the newest click only
    """One of several words, or a whole number of at least `least`."""

    name = "N"

    def __init__(self, *words: str, least: int) -> None:
        self.words, self.least = words, least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return the number, or the word unchanged."""
        if value in self.words or isinstance(value, int):
            return value  # type: ignore[no-any-return]
        if not DIGITS.fullmatch(value) or int(value) < self.least:
            words = ", ".join(self.words)
            self.fail(f"{value[:30]!r} is neither {words} nor a number from {self.least} to 999,999", param, ctx)
        return int(value)


class CpuList(click.ParamType):  # type: ignore[type-arg]  # generic in the newest click only
    """A CPU list in the kernel's format, such as 0-15,32, as taskset and numactl accept."""

    name = "CPUs"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the CPU numbers, ascending."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = parse_list(value)
        except ValueError as error:
            self.fail(f"{error}: give CPUs as in 0-15,32", param, ctx)
        return numbers or self.fail("give at least one CPU, as in 0-15,32", param, ctx)


def _click_option(option: Option) -> Callable[[F], F]:
    kind: dict[str, Any]
    if option.kind == NUMBER:
        kind = {"type": WordOrNumber("auto", least=int(option.least)), "metavar": "auto|N"}
    elif option.kind == COUNT:
        kind = {"type": click.IntRange(int(option.least)), "metavar": "N"}
    elif option.kind == SPEED:
        kind = {"type": FiniteRange(option.least), "metavar": "GBIT/S"}
    elif option.kind == CPUS:
        kind = {"type": CpuList(), "metavar": "CPUS"}
    elif option.kind == FLAG:
        kind = {"is_flag": True, "default": None}
    else:
        kind = {"type": click.Choice(option.choices)}
    default = "  [default: the fabric's]" if option.kind == SPEED else ""
    return click.option(option.flag, cls=PlanningOption, help=f"{option.help}{default}", **kind)


CLICK_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--machine",
        shell_complete=complete_machine,
        default="this",
        metavar="MACHINE",
        help="plan this machine: 'this' host (the default), a catalog name, an lstopo FILE.xml, a folder or tarball "
        "with /sys and /proc, or 'pack:2 core:24 pu:2'",
    ),
    click.option("--hosts", cls=PlanningOption, metavar="LIST", help="run on these hosts: n1,n2 or n[001-128,130]"),
    path_option(
        "--hostfile", cls=PlanningOption, metavar="FILE", help="read hosts from FILE (in any launcher's format)"
    ),
    number_option("--nodes", cls=PlanningOption, help="plan for N hosts whose names are not known yet"),
    click.option("-n", "-np", "--np", "ranks", cls=PlanningOption, type=WordOrNumber("auto", least=1), hidden=True),
    *map(_click_option, OPTIONS),
    click.option(
        "--launcher",
        type=click.Choice(LAUNCHER_NAMES),
        default="auto",
        help="start the ranks with this program; auto: found on PATH",
    ),
    click.option(
        "--fabric",
        type=click.Choice(["auto", *FABRICS]),
        default="auto",
        help="set up this network between the hosts; auto: detected",
    ),
    click.option(
        "--bind",
        type=click.Choice(["self", "launcher"]),
        default="self",
        help="let each rank bind itself, or leave binding to the launcher",
    ),
)


def planning_options(command: F) -> F:
    """Add the planning options; the command receives them as one argument, `options`."""

    def gathered(
        hosts: str | None, hostfile: Path | None, nodes: int | None, ranks: int | str | None, **rest: Any
    ) -> Any:  # click passes options by name
        given = {option.name: rest.pop(option.name) for option in OPTIONS}
        if ranks is not None:
            _check_one_host(hosts, hostfile, nodes, rest.get("host_groups"))
            given["ppn"] = ranks
        listed = requested_hosts(hosts, hostfile, nodes)
        given["ppn"] = workers_per_host(listed.hosts, given["ppn"])
        options = PlanningOptions(
            hosts=tuple(host.name for host in listed.hosts),
            real_hosts=hosts is not None or hostfile is not None,
            hostfile_format=listed.format,
            given=given,
            **{name: rest.pop(name) for name in ("machine", "launcher", "bind", "fabric")},
        )
        return command(options=options, **rest)

    gathered.__doc__ = command.__doc__
    gathered.__name__ = command.__name__
    decorated: Any = gathered
    for option in reversed(CLICK_OPTIONS):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def _check_one_host(*hosts: Any) -> None:
    """Raise InputError for a total number of ranks if the job may have several hosts; on one host it equals --ppn."""
    found = scheduler_allocation(os.environ)
    if any(hosts) or (found is not None and found.uses_one_host):
        raise InputError(
            "-n, -np or --np is the total number of ranks in other launchers; cputrain takes the workers per host: "
            "give --ppn N"
        )


def hidden_options(*names: str) -> Callable[[F], F]:
    """Hide planning options that the command always rejects from --help; the error message names the alternative."""

    def hide(command: F) -> F:
        for param in getattr(command, "__click_params__"):  # noqa: B009  click's attribute, missing from its types
            if param.name in names:
                param.hidden = True
        return command

    return hide
