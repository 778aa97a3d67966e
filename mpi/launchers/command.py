"""Which launcher this host has, found on PATH and identified by its version; a job's command line, and launch.sh."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import either
from cputrain.mpi.hosts.hostfile import Host, format_hosts
from cputrain.mpi.launchers.programs import (
    LAUNCHERS,
    Files,
    InstalledLauncher,
    Job,
    LaunchCommand,
    Launcher,
    Tokens,
    local_commands,
)

VERSION_TIMEOUT_S = 60.0
SYSTEM_PREFIXES = ("/usr", "/usr/local")
SUGGESTED = "openmpi"  # to those who have no launcher


def newest_version(name: str) -> InstalledLauncher:
    """The launcher in its newest version, for hosts that cannot be inspected."""
    launcher = LAUNCHERS[name]
    return InstalledLauncher(launcher=launcher, version=launcher.newest, program=launcher.programs[0])


def on_job_hosts(name: str) -> InstalledLauncher:
    """The launcher as job scripts call it: in its newest version, whose options all versions take, and by its binary,
    as a shell script would end at a signal that is meant for the ranks."""
    newest = newest_version(name)
    return replace(newest, program=newest.launcher.binary or newest.program)


def find_launcher(
    requested: str, env: Mapping[str, str], launchers: Mapping[str, Launcher] = LAUNCHERS
) -> InstalledLauncher:
    """The requested launcher on PATH; "auto" takes that of the job around this process, else whatever mpirun is.

    Raises InputError naming the package to install where there is none, or where mpirun is another launcher.
    """
    path = env.get("PATH")
    if requested == "auto":
        inside = (one for one in launchers.values() if one.job_variable is not None and one.job_variable in env)
        launcher = next((one for one in inside if shutil.which(one.programs[0], path=path)), None)
    else:
        launcher = launchers[requested]
    if launcher is not None and launcher.version is None:
        program = shutil.which(launcher.programs[0], path=path)
        if program is None:
            raise InputError(f"no {launcher.programs[0]} on PATH: install {launcher.package}")
        return InstalledLauncher(launcher=launcher, version=(), program=program)
    mpis = [one for one in launchers.values() if one.version is not None]
    programs = launcher.programs if launcher else dict.fromkeys(name for one in mpis for name in one.programs)
    found = [one for name in programs if (one := identify(name, env, launchers))]
    match = next((one for one in found if launcher in (None, one.launcher)), None)
    if match is None:
        missing = f"no {_any_program(launchers)}" if launcher is None else f"no {requested}"
        here = f"; {Path(found[0].program).name} here is {found[0].launcher.title}" if found else ""
        raise InputError(f"{missing} on PATH{here}: install {(launcher or launchers[SUGGESTED]).package}")
    return match


def without_path(installed: InstalledLauncher) -> InstalledLauncher:
    """The same launcher, to be called from any environment: a script among its programs looks for the binary on PATH,
    which nothing has set where the installation needs variables of its own."""
    if installed.launcher.binary is None or not installed.variables:
        return installed
    binary = Path(installed.program).with_name(installed.launcher.binary)
    return replace(installed, program=str(binary)) if binary.is_file() else installed


def identify(
    name: str, env: Mapping[str, str], launchers: Mapping[str, Launcher] = LAUNCHERS
) -> InstalledLauncher | None:
    """The program of this name on PATH, or of this path, as the launcher whose version it prints; None where there is
    none."""
    program = shutil.which(name, path=env.get("PATH"))
    if program is None:
        return None
    candidates = [one for one in launchers.values() if one.version is not None]
    prefix = Path(program).resolve().parent.parent
    needed = {launcher.name: launcher.environment(prefix, env) for launcher in candidates}
    all_needed = dict(variable for variables in needed.values() for variable in variables)
    try:
        result = subprocess.run(
            [program, "--version"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=VERSION_TIMEOUT_S,
            env={**env, **all_needed},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{program} --version fails: {error}: put a working launcher first on PATH") from None
    for launcher in candidates:
        assert launcher.version is not None
        match = launcher.version.search(result.stdout + result.stderr)
        if match:
            return InstalledLauncher(
                launcher=launcher,
                version=tuple(int(part) for part in match.groups() if part),
                program=program,
                prefix=None if str(prefix) in SYSTEM_PREFIXES else str(prefix),
                as_root=os.geteuid() == 0,
                variables=needed[launcher.name],
            )
    known = either([launcher.title for launcher in candidates])
    raise InputError(f"{program} is an unknown launcher: put {known} first on PATH")


def _any_program(launchers: Mapping[str, Launcher]) -> str:
    """The programs that "auto" looks for, in every job or in one of the launcher's own."""
    found = [one for one in launchers.values() if one.version is not None or one.job_variable is not None]
    return either(list(dict.fromkeys(name for one in found for name in one.programs)))


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
