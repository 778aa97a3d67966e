"""Options that several commands share, and what they make of them."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import click

from affinity.catalog import find_machine
from affinity.errors import InputError
from affinity.plan import Plan, Request, plan_machine
from affinity.profiles import PROFILES
from affinity.request import BALANCES
from affinity.runtime import Runtime, find_runtime, target_of
from mpi.hosts import expand

F = TypeVar("F", bound=Callable[..., Any])
NUMBERS = ("ppn", "threads", "inter_op", "comm_cores", "loader_cores")  # numbers or "auto"
OTHERS = ("profile", "balance", "local_batch", "link_gbit")


class AutoInt(click.ParamType):  # type: ignore[type-arg]  # generic in the newest click only
    """Either "auto" or a number that is at least `least`."""

    name = "auto|N"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """The number, or "auto" as it stands."""
        if value == "auto" or isinstance(value, int):
            return value  # type: ignore[no-any-return]
        if not value.isdigit() or int(value) < self.least:
            self.fail(f"{value!r} is neither auto nor a number of at least {self.least}", param, ctx)
        return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The planning options as given; None where the recipe or the rules decide."""

    machine: str
    hosts: tuple[str, ...]
    ppn: int | str | None
    threads: int | str | None
    inter_op: int | str | None
    comm_cores: int | str | None
    loader_cores: int | str | None
    smt: str | None
    profile: str | None
    balance: str | None
    local_batch: int | None
    link_gbit: float | None


def planning_options(command: F) -> F:
    """Add the planning options; the command gets one `asked`."""

    def gathered(
        machine: str, hosts: str | None, nodes: int | None, smt: str | None, **rest: Any
    ) -> Any:  # click passes options by name
        given = {key: rest.pop(key) for key in (*NUMBERS, *OTHERS)}
        asked = Asked(machine=machine, hosts=_hosts(hosts, nodes), smt=smt, **given)
        return command(asked=asked, **rest)

    gathered.__doc__ = command.__doc__
    gathered.__name__ = command.__name__
    options = (
        click.option(
            "--machine",
            default="this",
            metavar="this|NAME|DIR|TARBALL|FILE.xml|'pack:2 core:24 pu:2'",
            help="whose plan",
        ),
        click.option("--hosts", metavar="LIST", help="host names, as n1,n2 or n[001-128,130]"),
        click.option("--nodes", type=click.IntRange(1), help="number of hosts, where their names are not known"),
        click.option("--ppn", type=AutoInt(1), help="workers per host"),
        click.option("--threads", type=AutoInt(1), help="intra-op threads per worker"),
        click.option("--inter-op", type=AutoInt(1), help="inter-op threads per worker"),
        click.option("--comm-cores", type=AutoInt(0), help="cores per worker kept for communication"),
        click.option("--loader-cores", type=AutoInt(0), help="cores per worker kept for loading images"),
        click.option("--smt", type=click.Choice(["auto", "on", "off"]), help="second hardware threads compute"),
        click.option("--profile", type=click.Choice(list(PROFILES)), help="published practice decides what is auto"),
        click.option("--balance", type=click.Choice(BALANCES), help="batch: local batches in proportion to cores"),
        click.option("--local-batch", type=click.IntRange(1), help="images a step of a worker, on average"),
        click.option("--link-gbit", type=click.FloatRange(0.001), help="speed of a host's link  [default: 100]"),
    )
    decorated: Any = gathered
    for option in reversed(options):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def make_plan(asked: Asked, base: Request, command: tuple[str, ...] = ()) -> Plan:
    """The plan of the asked machine: what the options say, over what the recipe says, over the rules.

    `command` is what will run: the libraries are those of the Python that it starts.
    """
    # Another machine's libraries are not here to be looked for; its ranks run this same Python, with torch's libgomp.
    runtime = find_runtime(target_of(command), os.environ) if asked.machine == "this" else Runtime()
    return plan_machine(find_machine(asked.machine), request(asked, base), runtime)


def request(asked: Asked, base: Request) -> Request:
    """What the options ask for, over what the recipe asks for."""
    changes: dict[str, Any] = {"nodes": len(asked.hosts)}
    changes |= {name: value for name in OTHERS if (value := getattr(asked, name)) is not None}
    for name in NUMBERS:
        value = getattr(asked, name)
        if value is not None:
            changes[name] = None if value == "auto" else value
    if asked.smt is not None:
        changes["smt"] = asked.smt == "on"
    return replace(base, **changes)


def _hosts(names: str | None, nodes: int | None) -> tuple[str, ...]:
    if names is None:
        return ("localhost",) if nodes in (None, 1) else tuple(f"node{i:03d}" for i in range(1, (nodes or 1) + 1))
    hosts = expand(names)
    if nodes not in (None, len(hosts)):
        raise InputError(f"--nodes {nodes} but --hosts names {len(hosts)}: leave one out")
    return hosts
