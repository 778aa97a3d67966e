"""Job x launcher -> the command that starts it. Pure: nothing is started, no file written."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from affinity.errors import InputError
from mpi.hosts.hostfile import Host, format_hosts
from mpi.launchers.job import Job
from mpi.launchers.launcher import Files, InstalledLauncher, LaunchCommand, Launcher, Tokens

HOSTS = "hosts"


def launch_command(
    job: Job, installed: InstalledLauncher, command: tuple[str, ...], folder: Path | None
) -> LaunchCommand:
    """What starts `command` as every rank of the job. Its files are to be in the folder; None: it gets no files.

    Raises InputError where the launcher cannot start this job.
    """
    launcher = installed.launcher
    _check(job, launcher)
    if job.het_groups and launcher.component is not None:
        return _of_components(job, installed, launcher.component, command)
    hosts, hostfile = _hosts(job, launcher, folder)
    binding: Tokens = launcher.unbound
    rankfile: Files = ()
    if job.binder == "launcher" and launcher.bound is not None:
        binding, rankfile = launcher.bound(job, installed, folder)
    variables = launcher.variables(job)
    exported: Tokens = ()
    if (option := launcher.rank_variable) is not None:
        exported = tuple(token for name, value in variables for token in option(name, value))
        variables = ()
    inherited = (token for name, _ in job.secrets for token in launcher.inherited(name))
    return LaunchCommand(
        argv=(
            *(installed.program, *launcher.rank_counts(job, installed), *hosts, *binding),
            *(*exported, *inherited, *launcher.last_options, *command),
        ),
        variables=(*installed.variables, *variables, *job.secrets),
        files=(*hostfile, *rankfile),
    )


def _of_components(
    job: Job, installed: InstalledLauncher, component: Callable[[int], Tokens], command: tuple[str, ...]
) -> LaunchCommand:
    """What starts the ranks of a heterogeneous job: the launcher's options and the command for each component."""
    if ":" in command:
        raise InputError(
            f"{installed.launcher.title} takes the command's word ':' for its own in a heterogeneous job: leave it out"
        )
    words: Tokens = (installed.program,)
    for number, group in zip(job.het_groups, job.groups, strict=True):
        alone = launch_command(replace(job, groups=(group,), het_groups=()), installed, command, None)
        words += (*((":",) if number != job.het_groups[0] else ()), *component(number), *alone.argv[1:])
    variables = installed.launcher.variables(job)
    return LaunchCommand(argv=words, variables=(*installed.variables, *variables, *job.secrets))


def _check(job: Job, launcher: Launcher) -> None:
    """Raise InputError where the launcher cannot start this job."""
    if job.binder == "launcher":
        if len(job.groups) > 1:
            raise InputError("--bind launcher gives all hosts the same masks: hosts that differ need --bind self")
        if any(group.plan.oversubscribed for group in job.groups):
            raise InputError("--bind launcher gives each rank cores of its own: remove it or --oversubscribe")
        if launcher.bound is None:
            raise InputError(f"{launcher.title} cannot bind its ranks as planned: remove --bind launcher")
    if launcher.equal_hosts and len(job.groups) > 1 and not job.het_groups:
        raise InputError(
            f"{launcher.title} starts the same number of ranks on every host: hosts that differ need an MPI's launcher"
        )


def _hosts(job: Job, launcher: Launcher, folder: Path | None) -> tuple[Tokens, Files]:
    """The tokens that name the job's hosts, and the hostfile where there is a folder for it."""
    options = launcher.hosts
    if options is None:
        return (), ()
    if folder is None:
        return options.inline(job), ()
    path = folder / HOSTS
    hosts = job.slots if options.slots else tuple(Host(name=host) for host in job.hosts)
    return options.from_file(path), ((path, format_hosts(hosts, options.file_format)),)
