"""The commands of the reference documents' experiments: the command line takes every one."""

import shlex

import click
import pytest

from benchmarks.documents_rows import ROWS, Row
from cputrain.cli import group


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.experiment)
def test_the_command_line_takes_an_experiment_s_commands(row: Row) -> None:
    for line in (*row.full, *row.small):
        words = shlex.split(line)
        words = words[words.index("cputrain") :]  # behind mpirun and its options
        command: click.Command = group
        while isinstance(command, click.Group):
            words = words[1:]
            found = command.get_command(click.Context(command), words[0])
            assert found is not None, line
            command = found
        with command.make_context(words[0], words[1:]):
            pass
