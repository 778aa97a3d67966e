"""Start -> a shell script that anybody can run: every value quoted, files beside it."""

import shlex

from mpi.launch import Start


def launch_script(start: Start, about: str, *, open_end: bool = False) -> str:
    """A POSIX shell script; its folder becomes the working directory, which the start's paths are relative to.

    `open_end`: the script's arguments are the end of the command.
    """
    exports = [f"export {name}={shlex.quote(value)}" for name, value in start.variables]
    said = " ".join(about.split())
    lines = [
        "#!/bin/sh",
        f"# {said}",
        "set -eu",
        'cd "$(dirname "$0")"',
        *exports,
        f"exec {broken(start.argv)}" + (' "$@"' if open_end else ""),
    ]
    return "\n".join(lines) + "\n"


def broken(argv: tuple[str, ...], width: int = 100) -> str:
    """A command over several lines, every token quoted."""
    lines, line = [], ""
    for token in map(shlex.quote, argv):
        if line and len(line) + len(token) + 1 > width:
            lines.append(line)
            line = f"    {token}"
        else:
            line = f"{line} {token}" if line else token
    return " \\\n".join([*lines, line])
