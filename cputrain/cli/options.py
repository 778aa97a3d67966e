"""Options that several commands share, and what they make of them."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from affinity.errors import InputError
from affinity.kernel.neighbors import NOT_SHARED, plan_beside
from affinity.planner.plan import Plan, Request, plan_machine
from affinity.planner.profiles import PROFILES
from affinity.planner.request import BALANCES, OPENMP
from affinity.planner.runtime import Runtime, find_runtime, target_of
from affinity.topology.catalog import find_machine
from mpi.fabric import FABRICS, Fabric, fabric_here
from mpi.hosts.groups import Cluster, one_group, plan_cluster
from mpi.hosts.hostfile import FORMATS, Host, check_name, read_hostfile
from mpi.hosts.nodelist import expand
from mpi.launchers.detect import find_launcher, newest_version, without_path
from mpi.launchers.launcher import InstalledLauncher
from mpi.launchers.table import LAUNCHERS

F = TypeVar("F", bound=Callable[..., Any])
NUMBERS = ("ppn", "threads", "inter_op", "comm_cores", "loader_cores")  # numbers or "auto"
KINDS = ["auto", "local", *LAUNCHERS]
PLAIN = ("machine", "smt", "share", "launcher", "bind", "fabric")
OTHERS = ("profile", "openmp", "oversubscribe", "balance", "local_batch", "link_gbit")


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
    """The planning options as given; None where the recipe or the rules decide.

    `named` says that the hosts' names are real ones, `host_form` how their list was written, `kinds` which machine
    each group of them is, where they are not all alike.
    """

    machine: str
    hosts: tuple[str, ...]
    ppn: int | str | None
    threads: int | str | None
    inter_op: int | str | None
    comm_cores: int | str | None
    loader_cores: int | str | None
    smt: str | None
    profile: str | None
    openmp: str | None
    oversubscribe: bool | None
    share: bool
    balance: str | None
    local_batch: int | None
    link_gbit: float | None
    launcher: str
    bind: str
    fabric: str
    named: bool
    host_form: str
    kinds: tuple[tuple[tuple[str, ...], str], ...] = ()

    @property
    def network(self) -> Fabric:
        """The fabric between the hosts: this host's own, or, for another machine, that of the published run."""
        here = "shm" if len(self.hosts) == 1 else fabric_here() if self.machine == "this" else "opa"
        return FABRICS[here if self.fabric == "auto" else self.fabric]


def planning_options(command: F) -> F:
    """Add the planning options; the command gets one `asked`."""

    def gathered(
        hosts: str | None, hostfile: Path | None, nodes: int | None, **rest: Any
    ) -> Any:  # click passes options by name
        given = {key: rest.pop(key) for key in (*PLAIN, *NUMBERS, *OTHERS)}
        listed, form = _hosts(hosts, hostfile, nodes)
        given["ppn"] = _slots(listed, given["ppn"])
        named = hosts is not None or hostfile is not None
        asked = Asked(hosts=tuple(host.name for host in listed), named=named, host_form=form, **given)
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
        click.option("--hostfile", type=click.Path(path_type=Path), help="hosts in any launcher's format"),
        click.option("--nodes", type=click.IntRange(1), help="number of hosts, where their names are not known"),
        click.option("--ppn", type=AutoInt(1), help="workers per host"),
        click.option("--threads", type=AutoInt(1), help="intra-op threads per worker"),
        click.option("--inter-op", type=AutoInt(1), help="inter-op threads per worker"),
        click.option("--comm-cores", type=AutoInt(0), help="cores per worker kept for communication"),
        click.option("--loader-cores", type=AutoInt(0), help="cores per worker kept for loading images"),
        click.option("--smt", type=click.Choice(["auto", "on", "off"]), help="second hardware threads compute"),
        click.option("--profile", type=click.Choice(list(PROFILES)), help="published practice decides what is auto"),
        click.option(
            "--openmp", type=click.Choice(OPENMP), help="auto: the profile's runtime, or that which is loaded"
        ),
        click.option(
            "--oversubscribe", is_flag=True, default=None, help="allow more workers than cores: they share cores"
        ),
        click.option("--share", is_flag=True, help="leave cores to running processes of other plans"),
        click.option("--balance", type=click.Choice(BALANCES), help="batch: local batches in proportion to cores"),
        click.option("--local-batch", type=click.IntRange(1), help="images a step of a worker, on average"),
        click.option("--link-gbit", type=click.FloatRange(0.001), help="speed of a host's link, if not the fabric's"),
        click.option("--launcher", type=click.Choice(KINDS), default="auto", help="auto: what is on PATH here"),
        click.option("--fabric", type=click.Choice(["auto", *FABRICS]), default="auto", help="network between hosts"),
        click.option("--bind", type=click.Choice(["self", "launcher"]), default="self", help="who binds the ranks"),
    )
    decorated: Any = gathered
    for option in reversed(options):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def make_plan(asked: Asked, base: Request, command: tuple[str, ...] = ()) -> Plan:
    """The plan of the asked machine: what the options say, over what the recipe says, over the rules.

    `command` is what will run: the libraries are those of the Python that it starts.
    """
    wanted = request(asked, base)
    # Another machine's libraries are not here to be looked for; its ranks run this same Python, with torch's libgomp.
    runtime = Runtime()
    if asked.machine == "this":
        runtime = find_runtime(target_of(command), os.environ, openmp=wanted.openmp)
        if asked.hosts == ("localhost",):
            return plan_beside(wanted, runtime, os.environ, share=asked.share)
    if asked.share:
        raise InputError(NOT_SHARED)
    return plan_machine(find_machine(asked.machine), wanted, runtime)


def request(asked: Asked, base: Request) -> Request:
    """What the options ask for, over what the recipe asks for."""
    changes: dict[str, Any] = {"nodes": len(asked.hosts), "link_gbit": asked.network.link_gbit}
    changes |= {name: value for name in OTHERS if (value := getattr(asked, name)) is not None}
    for name in NUMBERS:
        value = getattr(asked, name)
        if value is not None:
            changes[name] = None if value == "auto" else value
    if asked.smt is not None:
        changes["smt"] = asked.smt == "on"
    return replace(base, **changes)


def cluster_of(asked: Asked, base: Request, command: tuple[str, ...] = ()) -> Cluster:
    """The plans of the asked hosts: one for all, or one for each kind."""
    if not asked.kinds:
        return one_group(asked.hosts, make_plan(asked, base, command))
    if asked.share:
        raise InputError(NOT_SHARED)
    return plan_cluster([(hosts, find_machine(spec)) for hosts, spec in asked.kinds], request(asked, base))


def with_kinds(asked: Asked, kinds: tuple[str, ...]) -> Asked:
    """What is asked of hosts of several kinds, each HOSTS=MACHINE."""
    if not kinds:
        return asked
    if len(asked.hosts) > 1 or asked.named or asked.machine != "this":
        raise InputError("--kind names hosts and machines: leave out --hosts, --nodes and --machine")
    pairs = []
    for kind in kinds:
        hosts, _, spec = kind.partition("=")
        if not spec:
            raise InputError(f"--kind {kind!r} is not HOSTS=MACHINE, as in n[001-128]=skx-8160-2s")
        pairs.append((tuple(check_name(host, "--kind") for host in expand(hosts)), spec))
    every = tuple(host for hosts, _ in pairs for host in hosts)
    return replace(asked, hosts=every, named=True, kinds=tuple(pairs))


def planned_launcher(asked: str, machine: str) -> InstalledLauncher:
    """The launcher of a job that is only planned: the one asked for, as it is here or as its newest version is.

    What is on PATH here says nothing of another machine: Intel MPI then, where nobody asks for another.
    """
    if asked == "auto" and machine != "this":
        return newest_version("intelmpi")
    try:
        return without_path(find_launcher(asked, os.environ))
    except InputError:
        return newest_version("intelmpi" if asked == "auto" else asked)


def tell_format(asked: Asked, launcher: InstalledLauncher) -> None:
    """Say that a hostfile is another launcher's, which this one would misread: it gets one in its own format."""
    options = launcher.launcher.hosts
    if options is not None and asked.host_form not in ("plain", options.file_format):
        click.echo(f"the hostfile is {FORMATS[asked.host_form]}: written anew for {launcher.name}", err=True)


def _hosts(names: str | None, hostfile: Path | None, nodes: int | None) -> tuple[tuple[Host, ...], str]:
    """The hosts, and the format that their list was written in."""
    if names is not None and hostfile is not None:
        raise InputError("--hosts and --hostfile: give one of them")
    form = "plain"
    if hostfile is not None:
        listed = read_hostfile(hostfile)
        hosts, form = listed.hosts, listed.format
    elif names is not None:
        hosts = tuple(Host(name=check_name(name, "--hosts")) for name in expand(names))
    else:
        count = nodes or 1
        hosts = tuple(Host(name="localhost" if count == 1 else f"node{i:03d}") for i in range(1, count + 1))
    if nodes not in (None, len(hosts)):
        raise InputError(f"--nodes {nodes} but {len(hosts)} hosts are named: leave one out")
    return hosts, form


def _slots(hosts: tuple[Host, ...], ppn: int | str | None) -> int | str | None:
    """Workers per host: as asked, which the hosts' slots must allow, or else as many as the slots."""
    slots = {host.slots for host in hosts}
    if slots == {None} or (ppn == "auto" and None in slots):
        return ppn
    if len(slots) > 1:
        few, many = hosts[0], next(host for host in hosts if host.slots != hosts[0].slots)
        raise InputError(
            f"host {few.name} has {few.slots} slots, {many.name} {many.slots}: hosts of several kinds need --kind each"
        )
    each = slots.pop()
    if isinstance(ppn, int) and ppn != each:
        raise InputError(f"ppn={ppn} but the hostfile gives {hosts[0].name} {each} slots: set ppn to {each} or mend it")
    return each
