"""Output for scripts: --format json, which prints one JSON object on stdout and everything else on stderr."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, TypeVar

import click
from click.core import ParameterSource

F = TypeVar("F", bound=Callable[..., Any])


def format_option(command: F) -> F:
    """Add --format text|json, as `output_format`."""
    return click.option(
        "--format",
        "output_format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        callback=_inherited,
        help="json: one object on stdout, and everything else on stderr",
    )(command)


def _inherited(context: click.Context, param: click.Parameter, value: str) -> str:
    """The format, or else the one that was given to the group: of `cputrain recipes --format json list`."""
    above = context.parent.params if context.parent is not None else {}
    given = context.get_parameter_source(str(param.name)) is not ParameterSource.DEFAULT
    return value if given else above.get("output_format", value)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    click.echo(json.dumps(value, indent=1))


@contextmanager
def only_results_on_stdout(output_format: str) -> Iterator[None]:
    """With "json", let whatever is printed inside go to stderr, also by the processes that are started there."""
    if output_format != "json":
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
