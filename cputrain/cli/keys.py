"""cputrain keys: the manual of every recipe key."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from shutil import get_terminal_size
from textwrap import TextWrapper, fill

import click

from affinity.errors import InputError
from affinity.text_table import align_columns
from affinity.wording import first_sentence
from cputrain.cli.json_output import format_option, print_json
from cputrain.recipe.keys import OTHER_NAMES
from cputrain.recipe.reference import KeyReference, SectionReference, reference

WIDEST = 100


@click.command("keys")
@click.argument("topic", required=False, metavar="[SECTION|KEY|TEXT]")
@format_option
def command(topic: str | None, output_format: str) -> None:
    """Print the manual of recipe keys: the values that each takes, its default, what it does.

    Without an argument: a line for each key. SECTION (optim) and KEY (optim.name) print their whole text; any other
    TEXT is looked for in names and texts, among them the names of other trainers (lr, wd, batch_size).
    """
    sections = reference()
    found = sections if topic is None else matching(sections, topic)
    if not found:
        names = [name for section in sections for name in (section.name, *(key.key for key in section.keys)) if name]
        near = get_close_matches(topic or "", names, n=3, cutoff=0.5)
        hint = f"the nearest are {', '.join(near)}" if near else "cputrain keys prints all of them"
        raise InputError(f"no recipe key, section or text of a key is {topic!r}: {hint}")
    if output_format == "json":
        print_json({"sections": [asdict(section) for section in found]})
    elif topic is None:
        click.echo(index_text(found))
    else:
        click.echo(manual_text(found, min(get_terminal_size().columns, WIDEST)))


def matching(sections: Sequence[SectionReference], topic: str) -> tuple[SectionReference, ...]:
    """The section of this name with those inside it, or the key of this name, or all keys that the topic occurs in."""
    name = topic.strip().removesuffix(".")
    inside = [each for each in sections if each.name == name or each.name.startswith((f"{name}.", f"{name}["))]
    if inside:
        return tuple(inside)
    return (
        _only(sections, lambda key: key.key == name)
        or _only(sections, lambda key: key.key in OTHER_NAMES.get(name.lstrip("-").replace("-", "_"), ()))
        or _only(sections, lambda key: name.lower() in f"{key.key} {key.values} {key.description}".lower())
    )


def _only(sections: Sequence[SectionReference], wanted: Callable[[KeyReference], bool]) -> tuple[SectionReference, ...]:
    """The sections with the wanted keys alone, without those that have none."""
    cut = (replace(section, keys=tuple(filter(wanted, section.keys))) for section in sections)
    return tuple(section for section in cut if section.keys)


def index_text(sections: Sequence[SectionReference]) -> str:
    """A line for each key: its values in short, its default, the first sentence of its text."""
    rows = [("key", "default", "meaning")]
    for section in sections:
        rows += [(key.key, key.default, first_sentence(key.description)) for key in section.keys]
    return align_columns(rows)


def manual_text(sections: Sequence[SectionReference], width: int) -> str:
    """The whole text of each key, in paragraphs of this width under their sections."""
    indented = TextWrapper(width=width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    parts = []
    for section in sections:
        blocks = [fill(f"{section.name or 'Top level'}: {section.description}", width)]
        for key in section.keys:
            blocks.append(
                "\n".join(
                    [
                        f"  {key.key}  (default: {key.default})",
                        indented.fill(f"Values: {key.values}."),
                        indented.fill(key.description),
                    ]
                )
            )
        parts.append("\n\n".join(blocks))
    return "\n\n".join(parts)
