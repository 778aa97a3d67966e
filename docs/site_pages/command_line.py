"""Page of the command line: cputrain from click's parameters, python -m cputrain.affinity from its --help."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from inspect import cleandoc

import click

from cputrain.cli import COMMANDS, group
from cputrain.cli.options import SectionedCommand
from site_pages.imports import ROOT
from site_pages.text import code, plain, table

INTRODUCTION = """# Command line

{commands}

Every command has `--help`. [Exit status](exit-status.md) lists what commands return.
"""
PLANNER = """## The planner on its own

`python -m cputrain.affinity` reads machines, makes plans, binds ranks and compares bindings for any training, without
importing torch.
"""
WITHOUT_TORCH = tuple(f"cputrain.affinity{words}" for words in ("", " read", " plan", " show", ".bind"))


def command_line() -> str:
    """Return every command with its options, in the order of --help."""
    links = [
        [f"[{code(f'cputrain {name}')}](#cputrain-{name.replace(' ', '-')})", plain(text)]
        for name, text in COMMANDS.items()
    ]
    root = click.Context(group, info_name="cputrain", max_content_width=100)
    sections = [part for name in COMMANDS for part in _sections(root, group, name, "##")]
    planner = [f"```text\n$ python -m {words} --help\n{_help(words)}```\n" for words in WITHOUT_TORCH]
    return "\n".join([INTRODUCTION.format(commands=table(["command", "purpose"], links)), *sections, PLANNER, *planner])


def _sections(parent: click.Context, commands: click.Group, name: str, heading: str) -> Iterator[str]:
    """Yield a command's usage, description and options, then its subcommands."""
    command = commands.get_command(parent, name)
    assert command is not None
    context = click.Context(command, info_name=name, parent=parent, max_content_width=100)
    sections = [("", [each for each in command.get_params(context) if isinstance(each, click.Option)])]
    if isinstance(command, SectionedCommand):
        sections = list(command.options_by_section(context))
    usage = " ".join(command.collect_usage_pieces(context))
    description = plain(cleandoc((command.help or "").replace("\b", "").partition("\f")[0]))
    options = "".join(_table(title, options, context) for title, options in sections)
    usage = f"```text\n{context.command_path} {usage}\n```"
    yield f"{heading} {context.command_path}\n\n{usage}\n\n{description}\n{options}"
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            yield from _sections(context, command, inner, f"{heading}#")


def _table(title: str, options: Sequence[click.Option], context: click.Context) -> str:
    """Return a table of a section's options without --help and hidden ones; "" if there are no others."""
    shown = [each for each in options if not each.hidden and "--help" not in each.opts]
    rows = [[_names(each), code(_values(each, context)), _help_of(each)] for each in shown]
    return f"\n{table([title or 'option', 'value', 'meaning'], rows)}\n" if rows else ""


def _names(option: click.Option) -> str:
    return " ".join(map(code, [*option.opts, *option.secondary_opts]))


def _values(option: click.Option, context: click.Context) -> str:
    """Return the placeholder of an option's value; `on` if it takes none."""
    return "on" if option.is_flag else option.make_metavar(context)


def _help_of(option: click.Option) -> str:
    default = option.default if option.show_default and not option.is_flag else None
    return plain(option.help or "") + (f" (default: {default})" if default is not None else "")


def _help(words: str) -> str:
    argv = [sys.executable, "-m", *words.split(), "--help"]
    env = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(
        argv,
        env=env,
        cwd=ROOT,
        check=True,
        capture_output=True,
        encoding="utf-8",
    ).stdout
