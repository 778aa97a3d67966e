"""Write the manual page of every command, generated from click's parameters: python -m tools.man_pages FOLDER

If the pages are in man/ when the wheel is built, it installs them to share/man/man1 (hatch_build.py).
"""

import re
import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import click

from cputrain import __version__
from cputrain.affinity.terminal import ExitStatus
from cputrain.cli import COMMANDS, group
from cputrain.cli.options import SectionedCommand


def man_pages() -> dict[str, str]:
    """Return the page of cputrain and of each command, including subcommands, by file name."""
    root = click.Context(group, info_name="cputrain")
    return {f"{name}.1": text for name, text in _pages(group, root, "plan, launch and train on CPU machines")}


def _pages(command: click.Command, context: click.Context, purpose: str) -> Iterator[tuple[str, str]]:
    name = context.command_path.replace(" ", "-")
    inner = _inner(command, context)
    also = [f"{name}-{each.replace(' ', '-')}" for each in inner]
    above = [] if context.parent is None else [context.parent.command_path.replace(" ", "-")]
    yield name, "".join(_page(command, context, name, purpose, (*above, *also)))
    for each, found in inner.items():
        inside = click.Context(found, info_name=each, parent=context)
        yield from _pages(found, inside, COMMANDS.get(each, "") if not above else found.get_short_help_str(200))


def _inner(command: click.Command, context: click.Context) -> dict[str, click.Command]:
    """Return the subcommands of a command."""
    if not isinstance(command, click.Group):
        return {}
    found = {name: command.get_command(context, name) for name in command.list_commands(context)}
    return {name: each for name, each in found.items() if each is not None}


def _page(
    command: click.Command, context: click.Context, name: str, purpose: str, also: tuple[str, ...]
) -> Iterator[str]:
    yield f'.TH {name.upper()} 1 "" "cputrain {__version__}" "cputrain"\n'
    yield f".SH NAME\n{name} \\- {roff(purpose)}\n"
    usage = " ".join(command.collect_usage_pieces(context))
    yield f".SH SYNOPSIS\n.B {roff(context.command_path)}\n{roff(usage)}\n"
    yield f".SH DESCRIPTION\n{_paragraphs(cleandoc((command.help or '').partition(chr(12))[0]))}"
    yield from _options(command, context)
    inner = _inner(command, context)
    if inner:
        yield ".SH COMMANDS\n"
        for each, found in inner.items():
            purpose = COMMANDS[each] if context.parent is None else found.get_short_help_str(200)
            yield f".TP\n.B {roff(each)}\n{roff(purpose)}\n"
    examples = getattr(command, "examples", ())
    if examples:
        yield ".SH EXAMPLES\n.nf\n" + "".join(f"{roff(line)}\n" for line in examples) + ".fi\n"
    yield _exit_statuses()
    if also:
        yield ".SH SEE ALSO\n.nh\n" + ",\n".join(f".BR {roff(each)} (1)" for each in also) + "\n.hy\n"


def _exit_statuses() -> str:
    rows = [*((str(status.value), status.meaning) for status in ExitStatus), ("128 + n", "signal n ended it")]
    return ".SH EXIT STATUS\n" + "".join(f".TP\n.B {number}\n{roff(meaning)}\n" for number, meaning in rows)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the options in the sections of --help."""
    if isinstance(command, SectionedCommand):
        sections = list(command.options_by_section(context))
    else:
        sections = [("", [each for each in command.get_params(context) if isinstance(each, click.Option)])]
    yield ".SH OPTIONS\n"
    for title, options in sections:
        records = [record for each in options if (record := each.get_help_record(context))]
        if title and records:
            yield f".SS {roff(title)}\n"
        for names, text in records:
            yield f".TP\n.B {roff(names)}\n{roff(text) or '.br'}\n"


def _paragraphs(text: str) -> str:
    """Format a docstring in paragraphs; one that starts with click's \\b keeps its lines."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.startswith("\b"):
            lines = "".join(f"{roff(line)}\n" for line in paragraph.splitlines()[1:])
            parts.append(f".PP\n.nf\n{lines}.fi\n")
        else:
            parts.append(f".PP\n{roff(' '.join(paragraph.split()))}\n")
    return "".join(parts)


def roff(text: str) -> str:
    """Escape text for roff, so that no character of it is a command."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("'", "\\(aq")
    return re.sub(r"^\.", r"\\&.", escaped.replace("\n", " "))


def main(folder: Path) -> None:
    """Write all pages into a folder, replacing the pages in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.1"):
        old.unlink()
    for name, text in man_pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
