"""LaunchCommand -> shell text that people can paste or run: a line, a script; every value quoted."""

import shlex
import sys
from pathlib import Path

from mpi.launchers.job import Job
from mpi.launchers.launcher import LaunchCommand
from mpi.launchers.local import local_commands

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
