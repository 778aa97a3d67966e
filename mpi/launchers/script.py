"""Start -> what anybody can paste or run: a line for a shell, a script; every value quoted."""

import shlex
import sys
from pathlib import Path

from mpi.launchers.job import Job
from mpi.launchers.start import Start, local

# Stands for the script's own folder in a start's tokens: no real one can hold it.
HERE = Path("\0")
BY_WORKER = ("RANK", "LOCAL_RANK")


def launch_script(start: Start, about: str, *, open_end: bool = False) -> str:
    """A POSIX shell script, which runs in its caller's folder; HERE in its tokens becomes the script's own.

    `open_end`: the script's arguments are the end of the command; `python` in it is the one that planned, for which the
    plan's OpenMP settings are made, and not a launcher's own that comes first on PATH.
    """
    python = f'case ${{1-}} in python | python3) shift; set -- {quoted(sys.executable)} "$@" ;; esac'
    exports = [f"export {name}={quoted(value)}" for name, value in start.variables]
    said = " ".join(about.split())
    lines = [
        "#!/bin/sh",
        f"# {said}",
        "set -eu",
        """here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)""",
        "unset MASTER_PORT  # not every launcher passes it on: the ranks find a port themselves",
        *exports,
        *((python,) if open_end else ()),
        f"exec {broken(start.argv)}" + (' "$@"' if open_end else ""),
    ]
    return "\n".join(lines) + "\n"


def line(start: Start) -> str:
    """A line for any shell that sets the start's variables and starts it; a MASTER_PORT that the shell has is left out,
    as not every launcher passes it on to all ranks."""
    assignments = tuple(f"{name}={value}" for name, value in start.variables)
    unset = () if "MASTER_PORT" in dict(start.variables) else ("-u", "MASTER_PORT")
    return shlex.join(("env", *unset, *assignments, *start.argv))


def workers_line(job: Job, port: int) -> str:
    """A line for a POSIX shell that starts the job's workers on this host, as `launch.local` has them, and waits.

    Its status is 0 where all of theirs are.
    """
    started = local(job, port)
    argv, variables = started[0]
    told = " ".join(f"{name}={'$i' if name in BY_WORKER else shlex.quote(v)}" for name, v in variables.items())
    numbers = " ".join(map(str, range(len(started))))
    loop = f'for i in {numbers}; do {told} {shlex.join(argv)} & set -- "$@" $!; done'
    return f'(set --; {loop}; s=0; for p in "$@"; do wait $p || s=$?; done; exit $s)'


def broken(argv: tuple[str, ...], width: int = 100) -> str:
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
