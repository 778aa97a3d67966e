"""The planning options that `plan`, `launch` and `job` share: declared here, interpreted in `cputrain.launch`."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from affinity.planner.profiles import PROFILES
from affinity.planner.request import ALLOCATOR, BALANCES, E_CORES, OPENMP
from affinity.topology.cpuset import parse_list
from cputrain.cli.numbers import FiniteRange
from cputrain.launch.hosts import requested_hosts, workers_per_host
from cputrain.launch.instances import LATENCY, THROUGHPUT
from cputrain.launch.options import NUMBERS_OR_AUTO, REQUEST_FIELDS, PlanningOptions
from mpi.fabric import FABRICS
from mpi.launchers.table import LAUNCHERS

NUMBER = re.compile("[0-9]{1,6}")
F = TypeVar("F", bound=Callable[..., Any])
LAUNCHER_NAMES = ["auto", "local", *LAUNCHERS]
OTHER_OPTIONS = ("machine", "smt", "share", "launcher", "bind", "fabric")


class AutoInt(click.ParamType):  # type: ignore[type-arg]  # generic in the newest click only
    """Either "auto" or a number that is at least `least`."""

    name = "auto|N"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """The number, or "auto" unchanged."""
        if value == "auto" or isinstance(value, int):
            return value  # type: ignore[no-any-return]
        if not NUMBER.fullmatch(value) or int(value) < self.least:
            self.fail(f"{value[:30]!r} is neither auto nor a number from {self.least} to 999,999", param, ctx)
        return int(value)


class CpuList(click.ParamType):  # type: ignore[type-arg]  # generic in the newest click only
    """CPUs in the kernel's format, as in 0-15,32, which taskset and numactl take too."""

    name = "CPUs"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Their numbers, ascending."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = parse_list(value)
        except ValueError as error:
            self.fail(f"{error}: give CPUs as in 0-15,32", param, ctx)
        return numbers or self.fail("give at least one CPU, as in 0-15,32", param, ctx)


class Instances(click.ParamType):  # type: ignore[type-arg]  # generic in the newest click only
    """A number of copies of a program, or the way to choose it."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """The number, or LATENCY or THROUGHPUT unchanged."""
        if isinstance(value, int) or value in (LATENCY, THROUGHPUT):
            return value  # type: ignore[no-any-return]
        if not NUMBER.fullmatch(value) or int(value) < 1:
            self.fail(f"{value[:30]!r} is neither {LATENCY}, {THROUGHPUT} nor a number from 1", param, ctx)
        return int(value)


def _auto_int(name: str, help_text: str, least: int = 1) -> Callable[[F], F]:
    return click.option(name, type=AutoInt(least), metavar="auto|N", help=help_text)


OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--machine",
        default="this",
        metavar="MACHINE",
        help="plan this machine: this (the default), a catalog name, an lstopo FILE.xml, a folder or tarball with /sys "
        "and /proc, or 'pack:2 core:24 pu:2'",
    ),
    click.option("--hosts", metavar="LIST", help="host names: n1,n2 or n[001-128,130]"),
    click.option(
        "--hostfile",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="file of host names, in any launcher's format",
    ),
    click.option(
        "--nodes", type=click.IntRange(1), metavar="N", help="number of hosts, if their names are not known yet"
    ),
    _auto_int("--ppn", "workers per host"),
    _auto_int("--threads", "intra-op threads per worker"),
    _auto_int("--inter-op", "inter-op threads per worker"),
    _auto_int("--comm-cores", "cores per worker reserved for communication", least=0),
    _auto_int("--loader-cores", "cores per worker reserved for loading images", least=0),
    click.option(
        "--smt",
        type=click.Choice(["auto", "on", "off"]),
        help="compute on the second hardware thread of each core, too",
    ),
    click.option("--profile", type=click.Choice(list(PROFILES)), help="published settings for everything left at auto"),
    click.option(
        "--openmp", type=click.Choice(OPENMP), help="OpenMP runtime; auto: the profile's, or the one that is loaded"
    ),
    click.option(
        "--allocator", type=click.Choice(ALLOCATOR), help="memory allocator; auto: tcmalloc or jemalloc where found"
    ),
    click.option(
        "--cores",
        type=CpuList(),
        metavar="CPUS",
        help="plan with these CPUs alone, numbered as in taskset: 0-15,32; hyper-threads only where listed too",
    ),
    click.option("--e-cores", type=click.Choice(E_CORES), help="slower cores; auto: they compute where that is faster"),
    click.option("--oversubscribe", is_flag=True, default=None, help="allow more workers than cores; they share cores"),
    click.option("--share", is_flag=True, help="avoid cores that are used by running processes of other plans"),
    click.option(
        "--balance",
        type=click.Choice(BALANCES),
        help="equal local batches, or (batch) in proportion to each worker's cores",
    ),
    click.option("--local-batch", type=click.IntRange(1), metavar="N", help="images per step of a worker, on average"),
    click.option(
        "--link-gbit",
        type=FiniteRange(0.001),
        metavar="GBIT/S",
        help="link speed of a host  [default: the fabric's]",
    ),
    click.option(
        "--launcher",
        type=click.Choice(LAUNCHER_NAMES),
        default="auto",
        help="program that starts the ranks; auto: found on PATH",
    ),
    click.option(
        "--fabric",
        type=click.Choice(["auto", *FABRICS]),
        default="auto",
        help="network between the hosts; auto: detected",
    ),
    click.option(
        "--bind",
        type=click.Choice(["self", "launcher"]),
        default="self",
        help="each rank binds itself, or the launcher does",
    ),
)


def planning_options(command: F) -> F:
    """Add the planning options; the command gets them as one argument, `options`."""

    def gathered(
        hosts: str | None, hostfile: Path | None, nodes: int | None, **rest: Any
    ) -> Any:  # click passes options by name
        given = {key: rest.pop(key) for key in (*OTHER_OPTIONS, *NUMBERS_OR_AUTO, *REQUEST_FIELDS)}
        listed = requested_hosts(hosts, hostfile, nodes)
        given["ppn"] = workers_per_host(listed.hosts, given["ppn"])
        options = PlanningOptions(
            hosts=tuple(host.name for host in listed.hosts),
            real_hosts=hosts is not None or hostfile is not None,
            hostfile_format=listed.format,
            **given,
        )
        return command(options=options, **rest)

    gathered.__doc__ = command.__doc__
    gathered.__name__ = command.__name__
    decorated: Any = gathered
    for option in reversed(OPTIONS):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def hidden_options(*names: str) -> Callable[[F], F]:
    """Leave planning options out of --help that a command always refuses; its message says what to do instead."""

    def hide(command: F) -> F:
        for param in getattr(command, "__click_params__"):  # noqa: B009  click's own, which no type has
            if param.name in names:
                param.hidden = True
        return command

    return hide


def host_groups_option(command: F) -> F:
    """Add --host-group, as `host_groups`."""
    return click.option(
        "--host-group",
        "host_groups",
        multiple=True,
        metavar="HOSTS=MACHINE",
        help="hosts that are alike and their machine, as in 'n[001-128]=skx-8160-2s'; once for each group",
    )(command)


def settings_argument(command: F) -> F:
    """Add [KEY=VALUE]..., as `settings`: keys of the recipe that are set to other values."""
    return click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")(command)


def no_verify_option(command: F) -> F:
    """Add --no-verify."""
    return click.option(
        "--no-verify", is_flag=True, help="continue if the kernel gave a worker other CPUs or memory than planned"
    )(command)


def restarts_option(command: F) -> F:
    """Add --restarts N."""
    return click.option(
        "--restarts",
        type=click.IntRange(0, 1000),
        default=0,
        metavar="N",
        help="start again after a failure, N times at most",
    )(command)
