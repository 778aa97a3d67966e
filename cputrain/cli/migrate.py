"""`cputrain import`, the only command that reads the option tables of other launchers."""

import os
import shutil
from pathlib import Path

import click

from cputrain.affinity.errors import InputError
from cputrain.affinity.terminal import align_columns
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.cli.output import print_file
from cputrain.mpi.hostfile import read_hostfile
from cputrain.mpi.launch_command import identify_launcher
from cputrain.other_launchers import PROGRAMS
from cputrain.other_launchers.parsing import command_and_rest, parse_command, restore_text, split_words
from cputrain.other_launchers.translation import translate


@click.command("import", context_settings={"allow_interspersed_args": False})
@click.option(
    "--from",
    "name",
    type=click.Choice(list(PROGRAMS)),
    help="read the command line as this launcher's, if mpirun could belong to several",
)
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND-LINE")
def import_command(name: str | None, words: tuple[str, ...]) -> None:
    """Print the cputrain launch command equivalent to another launcher's command line; start nothing. Options that it
    does not contain are listed with reasons on stderr.

    \b
    cputrain import "ipexrun --nnodes 2 --nprocs-per-node 2 --ccl-worker-count 4 --hostfile hosts train.py"
    cputrain import torchrun --nproc-per-node 4 train.py --epochs 3
    cputrain import --from openmpi "mpirun -np 4 python train.py"

    Supported are ipexrun, torchrun, torch.backends.xeon.run_cpu, horovodrun, accelerate launch, deepspeed, srun, and
    mpirun of Intel MPI, Open MPI, MPICH and HPE PALS; if its options leave open which, the installed one decides.
    """
    rest = ""
    try:
        if len(words) == 1:
            line, rest = command_and_rest(words[0])
            words = split_words(line)
        parsed = parse_command(words, name, _launcher_of)
        found = translate(parsed, cores=len(this_machine().allowed_cores), hosts_in=_hosts_in)
    except InputError as error:
        raise InputError(restore_text(str(error))) from None
    print_file(f"{found.line} {rest}".rstrip() + "\n")
    if found.without:
        click.echo(f"options of {parsed.program.title} that are not needed or have no counterpart:", err=True)
        click.echo(align_columns([(f"  {option}", why) for option, why in found.without]), err=True)
    for note in found.notes:
        click.echo(f"note: {note}", err=True)


def _launcher_of(program: str) -> str | None:
    """Return the MPI that provides a program found on PATH or by its path; None if it is not here or not an MPI's."""
    path = shutil.which(program)
    if path is not None and "pals" in Path(path).resolve().parts:  # /opt/cray/pals/VERSION/bin
        return "pals"
    try:
        found = identify_launcher(program, os.environ)
    except InputError:
        return None
    return found.launcher.name if found else None


def _hosts_in(path: str) -> int | None:
    """Return the number of hosts in a hostfile; None if it cannot be read here."""
    try:
        return len(read_hostfile(Path(path)).hosts)
    except InputError:
        return None
