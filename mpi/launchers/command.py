"""A job's command line, and launch.sh."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.mpi.hosts.hostfile import Host, format_hosts
from cputrain.mpi.launchers.launcher import Files, InstalledLauncher, Job, LaunchCommand, Launcher, Tokens
from cputrain.mpi.launchers.programs import local_commands

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


# Stands for the script's own folder in a command's tokens: no real path can hold it.
HERE = Path("\0")
BY_WORKER = ("RANK", "LOCAL_RANK")


def launch_script(command: LaunchCommand, about: str, *, open_end: bool = False) -> str:
    """A POSIX shell script, which runs in its caller's folder; HERE in its tokens becomes the script's own folder.

    With `open_end` the script's arguments are the end of the command; `python` among them is the Python that planned,
    for which the plan's OpenMP settings are made, and not a launcher's own Python that comes first on PATH.
    """
    python = f'case ${{1-}} in python | python3) shift; set -- {quoted(sys.executable)} "$@" ;; esac'
    exports = [f"export {name}={quoted(value)}" for name, value in command.variables]
    lines = [
        "#!/bin/sh",
        f"# {' '.join(about.split())}",
        "set -eu",
        """here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)""",
        "unset MASTER_PORT  # not every launcher passes it on: the ranks find a port themselves",
        *exports,
        *((python,) if open_end else ()),
        f"exec {wrapped(command.argv)}" + (' "$@"' if open_end else ""),
    ]
    return "\n".join(lines) + "\n"


def shell_line(command: LaunchCommand) -> str:
    """A line for any shell that sets the command's variables and runs it; a MASTER_PORT of the shell is left out, as
    not every launcher passes it on to all ranks."""
    assignments = tuple(f"{name}={value}" for name, value in command.variables)
    unset = () if "MASTER_PORT" in dict(command.variables) else ("-u", "MASTER_PORT")
    return shlex.join(("env", *unset, *assignments, *command.argv))


def workers_line(job: Job, port: int) -> str:
    """A line for a POSIX shell that starts the job's workers on this host, as `local_commands` has them, and waits.

    Its exit status is 0 where all of theirs are.
    """
    commands = local_commands(job, port)
    first = commands[0]
    if job.instances is None and job.pods.count == 1:
        variables = " ".join(f"{name}={'$i' if name in BY_WORKER else shlex.quote(v)}" for name, v in first.variables)
        numbers = " ".join(map(str, job.started))
        start = f'for i in {numbers}; do {variables} {shlex.join(first.argv)} & set -- "$@" $!; done'
    else:
        start = "; ".join(f'{_assigned(one)} & set -- "$@" $!' for one in commands)
    return f'(set --; {start}; s=0; for p in "$@"; do wait $p || s=$?; done; exit $s)'


def _assigned(command: LaunchCommand) -> str:
    """A command with its variables."""
    return shlex.join(("env", *(f"{name}={value}" for name, value in command.variables), *command.argv))


def wrapped(argv: tuple[str, ...], width: int = 100) -> str:
    """A command over several lines, every token quoted."""
    lines, line = [], ""
    for token in map(quoted, argv):
        if line and len(line) + len(token) + 1 > width:
            lines.append(line)
            line = f"    {token}"
        else:
            line = f"{line} {token}" if line else token
    return " \\\n".join([*lines, line])


def quoted(token: str) -> str:
    """A token as a shell takes it; HERE in it is left to the shell."""
    parts = [shlex.quote(part) if part else "" for part in token.split(str(HERE))]
    return '"$here"'.join(parts) or "''"
