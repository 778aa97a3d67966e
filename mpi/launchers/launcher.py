"""A job as frozen values, and what a launcher has to say of itself."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.planner.plan_file import request_to_json
from cputrain.affinity.ranks.host_names import LOCALHOST, network_name
from cputrain.affinity.ranks.launcher_variables import LauncherVariables
from cputrain.affinity.ranks.rank import LOOPBACK, Pods
from cputrain.affinity.start import own_program
from cputrain.mpi.hosts.groups import HostGroup
from cputrain.mpi.hosts.hostfile import Host, hosts_with_slots

ONE_POD = Pods()
Variables = tuple[tuple[str, str], ...]
"""Names and values of environment variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One command, started on each host as often as its plan has workers, every copy bound by that plan.

    `plan_path` is where the ranks find the plan; `log_dir` gets one rank-N.log each. `binder` is "self" where each rank
    binds itself, "launcher" where the launcher binds the ranks. With `verify` a rank fails if the kernel bound it
    otherwise, or if its host is laid out otherwise and `allow_other_layout` is not set. With `keep_env` variables that
    a rank inherits win over the plan's. The output of `plain_rank` is shown without a label. `master_addr` and
    `master_port` are where the ranks meet; by default that is the first host, at a port that the ranks choose.
    `variables` are set for every rank; `secrets` too, but in no command line, where every user of a host can read them.
    With `plan_on_host` the ranks of each host plan it themselves, by the request of the groups' plans: hosts may
    differ. `instances` are the workers of this host to start as programs that know nothing of each other; None: all,
    as ranks of one job. `pods`: which part of a larger job this host's ranks are, where each pod starts its own. With
    `names_errors` the command itself says in a line what is wrong with its input before it exits with status 2. A rank
    has not started yet while it imports, or while one of the texts `starting` is in its Python stack. `het_groups` are
    the numbers of the components of a heterogeneous Slurm job that the groups are; () outside one.
    """

    groups: tuple[HostGroup, ...]
    command: tuple[str, ...]
    plan_path: Path
    log_dir: Path
    binder: str = "self"
    verify: bool = True
    allow_other_layout: bool = False
    keep_env: bool = False
    plain_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    variables: Variables = ()
    secrets: Variables = ()
    plan_on_host: bool = False
    instances: tuple[int, ...] | None = None
    pods: Pods = ONE_POD
    names_errors: bool = False
    starting: tuple[str, ...] = ()
    het_groups: tuple[int, ...] = ()

    @property
    def plan(self) -> Plan:
        """The plan of the first host group, which is the only one where all hosts are equal."""
        return self.groups[0].plan

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every host, in the order of the ranks."""
        return tuple(host for group in self.groups for host in group.hosts)

    @property
    def host_of_ranks(self) -> tuple[str, ...]:
        """Each rank's host."""
        return tuple(host for group in self.groups for host in group.hosts for _ in group.plan.workers)

    @property
    def slots(self) -> tuple[Host, ...]:
        """Every host with its number of ranks, in the order of the ranks."""
        return tuple(Host(name=host, slots=len(group.plan.workers)) for group in self.groups for host in group.hosts)

    @property
    def ppn(self) -> int:
        """Workers per host, in the first group."""
        return len(self.plan.workers)

    @property
    def started(self) -> tuple[int, ...]:
        """The ranks that are started on this host, or the numbers of programs without a rank."""
        first = self.pods.index * self.ppn
        return tuple(range(first, first + self.ppn)) if self.instances is None else self.instances

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return sum(len(group.hosts) * len(group.plan.workers) for group in self.groups)


def bound_command(job: Job, instance: int | None = None) -> tuple[str, ...]:
    """The job's command behind affinity/bind.py, the same tokens for every rank; for a program without a rank, those of
    its number."""
    flags = (
        *(() if instance is None else ("--local-rank", str(instance))),
        *(("--bound",) if job.binder == "launcher" else ()),
        *(() if job.verify else ("--no-verify",)),
        *(("--allow-other-layout",) if job.allow_other_layout else ()),
        *(("--keep-env",) if job.keep_env else ()),
    )
    plan = ("--plan", str(job.plan_path))
    if job.plan_on_host:
        plan = ("--plan-here", request_to_json(replace(job.plan.request, ppn=job.ppn)))
    return (*own_program("cputrain.affinity.bind"), *plan, *flags, "--", *job.command)


def rank_variables(job: Job) -> Variables:
    """Variables of every rank beside its plan's environment: where the ranks meet, and the job's own variables."""
    first = LOOPBACK if job.hosts == (LOCALHOST,) else network_name(job.hosts[0])
    port = () if job.master_port is None else (("MASTER_PORT", str(job.master_port)),)
    return (("MASTER_ADDR", job.master_addr or first), *port, *job.variables)


Tokens = tuple[str, ...]
"""Words of a command line."""
Files = tuple[tuple[Path, str], ...]
"""Paths and texts of files to write before a command starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """The command that starts a job: its tokens, variables to add to its environment, files to write beforehand."""

    argv: Tokens
    variables: Variables = ()
    files: Files = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """How a launcher takes the hosts of a job.

    `file_format` is that of its hostfile ("openmpi", "hydra" or "plain", see hosts/hostfile.py), `from_file` gives the
    tokens that name such a file, `inline` those that list the job's hosts without one. With `slots` the hostfile has
    each host's number of ranks.
    """

    file_format: str
    from_file: Callable[[Path], Tokens]
    inline: Callable[[Job], Tokens]
    slots: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """What differs between launchers when a job is started, and the variables that tell a rank its launcher.

    A scheduler's list of hosts is read in cputrain.mpi.hosts.schedulers; what people wrote for a launcher, in
    cputrain.other_launchers. The command line is: program, `rank_counts`, hosts, binding, `rank_variable` for each
    variable, `inherited` for each secret, `last_options`, the command of a rank.
    """

    name: str
    """The value of --launcher."""
    title: str
    """The name in messages."""
    programs: Tokens
    """Commands on PATH that may be this launcher, the most usual one first."""
    package: str
    """What to install where it is missing."""
    rank_counts: Callable[[Job, "InstalledLauncher"], Tokens]
    """Tokens for the number of ranks, after the program."""
    own_variables: LauncherVariables
    """What it leaves in the environment of its ranks."""

    version: re.Pattern[str] | None = None
    """Finds the version's numbers in the output of `PROGRAM --version`; None: the program's name is proof enough."""
    newest: tuple[int, ...] = ()
    """The version to assume where none is installed."""
    binary: str | None = None
    """The program itself, where `programs` are shell scripts: a signal reaches it, and it needs no PATH."""
    environment: Callable[[Path, Mapping[str, str]], Variables] = lambda _prefix, _env: ()
    """Variables that an installation below a prefix needs beside an environment."""
    job_variable: str | None = None
    """A variable of jobs in which `--launcher auto` takes this launcher."""
    schedulers: Tokens = ()
    """Schedulers whose job scripts may start their ranks with it: "slurm", "pbs"."""
    slots_of_scheduler: bool = False
    """Whether it takes a host's number of ranks from the scheduler, which has to be told it before the job runs."""

    hosts: HostOptions | None = None
    """How it takes hosts; None: `rank_counts` says it all."""
    equal_hosts: bool = False
    """Whether it starts the same number of ranks on every host, and so serves one host group only."""
    component: Callable[[int], Tokens] | None = None
    """Tokens for the ranks of one component of a heterogeneous job; a `:` stands between the components' commands."""
    reaches_hosts: bool = True
    """Whether it starts ranks on other hosts; False: people start it on each host."""

    unbound: Tokens = ()
    """Tokens with which it leaves its ranks unbound: they bind themselves."""
    bound: Callable[[Job, "InstalledLauncher", Path | None], tuple[Tokens, Files]] | None = None
    """Tokens, and files in the folder, with which it binds the ranks as planned; None: it cannot."""
    binds_by_file: bool = False
    """Whether `bound` needs a folder for a file."""

    has_pmi: bool = False
    """Whether its ranks may have a PMI process manager, with which oneCCL can use MPI."""
    mpi_operator_name: str | None = None
    """What Kubernetes' MPI operator calls it (`mpiImplementation` of an MPIJob); None: the operator cannot use it."""

    variables: Callable[[Job], Variables] = rank_variables
    """Variables that it has to pass to every rank."""
    rank_variable: Callable[[str, str], Tokens] | None = None
    """Tokens that set a variable for every rank; None: ranks inherit the launcher's own environment."""
    inherited: Callable[[str], Tokens] = lambda _name: ()
    """Tokens that pass a variable of the launcher's own environment on to every rank; none where it passes all on."""
    last_options: Tokens = ()
    """Tokens before the command of a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledLauncher:
    """A launcher as a host has it: its version, the program to call, and the variables that the program needs.

    `prefix` is its folder, if it is not the system's own; `as_root` whether the super-user calls it.
    """

    launcher: Launcher
    version: tuple[int, ...]
    program: str
    prefix: str | None = None
    as_root: bool = False
    variables: Variables = ()

    @property
    def name(self) -> str:
        """The launcher's name, as --launcher takes it."""
        return self.launcher.name


def hosts_with_ranks(file_format: str, file_option: str, list_option: str) -> HostOptions:
    """The options of a launcher that takes each host's number of ranks with its name, in a file and in a list."""
    return HostOptions(
        file_format=file_format,
        from_file=lambda path: (file_option, str(path)),
        inline=lambda job: (list_option, hosts_with_slots(job.slots)),
    )


def by_genv(name: str, value: str) -> Tokens:
    """A variable of every rank, as the launchers that descend from MPICH take it."""
    return ("-genv", name, value)
