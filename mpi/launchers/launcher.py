"""The record of a launcher, what a host has installed of it, and the command line that comes out."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from affinity.ranks.launcher_variables import LauncherVariables
from mpi.hosts.hostfile import hosts_with_slots
from mpi.launchers.job import Job, Variables, rank_variables

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

    `file_format` is that of its hostfile ("openmpi", "hydra" or "plain", see mpi.hosts.hostfile), `from_file` gives the
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

    A scheduler's list of hosts is read in mpi.hosts.schedulers; what people wrote for a launcher, in
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
