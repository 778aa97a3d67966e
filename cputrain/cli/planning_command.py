"""Commands with the planning options, which also take other launchers' names of them."""

import os
from collections.abc import Mapping, Sequence

import click

from affinity.errors import InputError
from cputrain.cli.sections import SectionedCommand
from mpi.hosts.schedulers import allocation

# Options of torchrun, ipexrun, mpirun and horovodrun that mean the same.
SAME = {
    **dict.fromkeys(("--nproc-per-node", "--nproc_per_node", "--nprocs-per-node", "--nprocs_per_node"), "--ppn"),
    **dict.fromkeys(("-ppn", "-perhost", "--npernode", "-npernode", "--ntasks-per-node"), "--ppn"),
    **dict.fromkeys(("--nnodes", "--num-nodes", "--num_nodes"), "--nodes"),
    **dict.fromkeys(("-H", "-hosts", "-host", "--host"), "--hosts"),
    **dict.fromkeys(("-f", "-hostfile", "-machinefile", "--machinefile"), "--hostfile"),
}
ALL_RANKS = ("-n", "-np", "--np")  # the ranks of all hosts, which on one host are the workers
HOSTS = ("--hosts", "--hostfile", "--nodes", "--host-group")


class PlanningCommand(SectionedCommand):
    """A command with the planning options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read other launchers' names of options as ours."""
        takes = {name: param.nargs for param in self.params if not getattr(param, "is_flag", 0) for name in param.opts}
        own = own_words(args, takes, interspersed=self.allow_interspersed_args)
        return super().parse_args(ctx, [*in_our_words(args[:own], os.environ), *args[own:]])


def own_words(args: Sequence[str], takes: Mapping[str, int], *, interspersed: bool) -> int:
    """How many of the first words are a command's own; `takes`: how many words its options take. The others, after
    -- or, unless they are `interspersed`, after the first word that is no option, belong to another program."""
    place = 0
    while place < len(args) and args[place] != "--":
        name, equals, _ = args[place].partition("=")
        if not name.startswith("-") and not interspersed:
            break
        values = 1 if name in SAME or name in ALL_RANKS else takes.get(name, 0) if name.startswith("-") else 0
        place += 1 if equals else 1 + values
    return min(place, len(args))


def in_our_words(args: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """The words with other launchers' options in place of ours. Raises InputError for a number of all ranks where there
    may be several hosts."""
    words = [_replaced(word, SAME) for word in args]
    named = [word for word in words if word.partition("=")[0] in ALL_RANKS]
    if named and (any(word.partition("=")[0] in HOSTS for word in words) or allocation(env) is not None):
        raise InputError(
            f"{named[0]} is the number of all ranks in other launchers; cputrain takes the workers of each host: give "
            "--ppn N"
        )
    return [_replaced(word, dict.fromkeys(ALL_RANKS, "--ppn")) for word in words]


def _replaced(word: str, names: Mapping[str, str]) -> str:
    name, equals, value = word.partition("=")
    return f"{names[name]}{equals}{value}" if name in names else word
