"""The commands of the reference documents' experiments: the command line takes every one, the docs show them all."""

import shlex
from pathlib import Path

import click
import pytest

from benchmarks.documents import Row, commands, rows_of_documents
from cputrain.cli import group

ROWS = rows_of_documents()
PAGE = (Path(__file__).parents[2] / "docs/documents.md").read_text()


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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.experiment)
def test_the_docs_have_an_experiment_s_commands(row: Row) -> None:
    assert f"| {row.experiment} | {commands(row.full)} | {commands(row.small)} |" in PAGE
