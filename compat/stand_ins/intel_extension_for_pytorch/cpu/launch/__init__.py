"""`python -m intel_extension_for_pytorch.cpu.launch` and ipexrun: translated as by `cputrain import`, then run."""

import os
import shlex
import sys

from cputrain import InputError, find_machine
from cputrain.other_launchers.parsing import parse_command
from cputrain.other_launchers.translation import translate


def command(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the line of `cputrain launch` for ipexrun's arguments, and notes on options without a counterpart."""
    if arguments[:1] == ["xpu"]:
        raise InputError("ipexrun xpu: cputrain starts processes on CPUs")
    words = ("ipexrun", *(arguments[1:] if arguments[:1] == ["cpu"] else arguments))
    parsed = parse_command(words, None, lambda _program: None)
    found = translate(parsed, cores=len(find_machine("this").allowed_cores), hosts_in=lambda _path: None)
    notes = [note for note in found.notes if note != parsed.program.remark]
    return found.line, [*(f"{option}: {why}" for option, why in found.without), *notes]


def main() -> None:
    """Print the translated command, and become it. Ends with status 2 and a line for wrong arguments."""
    try:
        line, notes = command(sys.argv[1:])
    except InputError as error:
        print(f"ipexrun: {error}", file=sys.stderr)
        sys.exit(2)
    print("\n".join((f"ipexrun: {line}", *(f"ipexrun: {note}" for note in notes))), file=sys.stderr, flush=True)
    before, _, after = line.partition("cputrain ")
    words = [*shlex.split(before), sys.executable, "-m", "cputrain", *shlex.split(after)]
    os.execvp(words[0], words)
