"""`cputrain recipes` and `cputrain keys`; the derived numbers of a recipe, for `plan` and `train`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from shutil import get_terminal_size
from textwrap import TextWrapper, fill

import click

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.planner.request import BF16, Reason
from cputrain.affinity.terminal import align_columns
from cputrain.affinity.wording import first_sentence
from cputrain.cli.output import curve, format_option, print_json, sampled
from cputrain.cli.words import catalog_group, command_or_list, complete_key, complete_recipe
from cputrain.data.from_settings import survey_data
from cputrain.files import recipe_names
from cputrain.measurements import AUTO_BF16_GAIN, BF16_GAIN, bf16_line
from cputrain.recipe.derivation import derive, explain, schedule_of
from cputrain.recipe.keys import KeyReference, SectionReference, other_names, reference
from cputrain.recipe.loading import ShippedRecipe, shipped_recipe, shipped_recipes
from cputrain.recipe.schema import Recipe
from cputrain.schedule import lr_at

HEAD = ("recipe", "network", "optimizer", "epochs", "what it trains")
MAX_WIDTH = 100


@click.group("recipes", cls=catalog_group(recipe_names), invoke_without_command=True)
@format_option
@click.pass_context
def recipes_command(context: click.Context, output_format: str) -> None:
    """List, search or show the shipped recipes. Without a command, list them; a NAME alone is shown, any other TEXT is
    searched for."""
    if context.invoked_subcommand is None:
        _show(shipped_recipes(), output_format)


@recipes_command.command("list")
@format_option
def list_recipes(output_format: str) -> None:
    """List all recipes."""
    _show(shipped_recipes(), output_format)


@recipes_command.command("search")
@click.argument("text")
@format_option
def search(text: str, output_format: str) -> None:
    """List the recipes whose file contains TEXT (a network, a data set, an author, 32k); case is ignored."""
    found = [
        each
        for each in shipped_recipes()
        if text.lower() in f"{each.name}\n{Path(each.file).read_text(encoding='utf-8')}".lower()
    ]
    if not found:
        raise InputError(f"no shipped recipe contains {text!r}: {command_or_list(text)}")
    _show(found, output_format)


@recipes_command.command("show")
@click.argument("recipe", shell_complete=complete_recipe, metavar="NAME")
@format_option
def show(recipe: str, output_format: str) -> None:
    """Print a recipe's file: its source, the published results, the derivation of its numbers, its settings."""
    found = shipped_recipe(recipe)
    text = Path(found.file).read_text(encoding="utf-8")
    if output_format == "json":
        print_json({**asdict(found), "text": text})
    else:
        click.echo(text, nl=False)


def _show(recipes: Sequence[ShippedRecipe], output_format: str) -> None:
    if output_format == "json":
        print_json({"recipes": [asdict(recipe) for recipe in recipes]})
        return
    rows = [(recipe.name, recipe.network, recipe.optimizer, str(recipe.epochs), recipe.summary) for recipe in recipes]
    click.echo(align_columns([HEAD, *rows]))
    click.echo("\ncputrain recipes show NAME prints a recipe; cputrain train NAME trains it")


@click.command("keys")
@click.argument("topic", shell_complete=complete_key, required=False, metavar="[SECTION|KEY|TEXT]")
@format_option
def keys_command(topic: str | None, output_format: str) -> None:
    """Print the manual of the recipe keys: accepted values, default, meaning.

    Without an argument, print a line per key. A SECTION (optim) or KEY (optim.name) prints its full text; any other
    TEXT is searched for in names and texts, including the names of other trainers (lr, wd, batch_size).
    """
    sections = reference()
    chosen = sections if topic is None else matching(sections, topic)
    if not chosen:
        names = [name for section in sections for name in (section.name, *(key.key for key in section.keys)) if name]
        near = get_close_matches(topic or "", names, n=3, cutoff=0.5)
        hint = f"the nearest are {', '.join(near)}" if near else "cputrain keys prints all of them"
        raise InputError(f"no recipe key, section or text of a key is {topic!r}: {hint}")
    if output_format == "json":
        print_json({"sections": [asdict(section) for section in chosen]})
    elif topic is None:
        click.echo(index_text(chosen))
    else:
        click.echo(manual_text(chosen, min(get_terminal_size().columns, MAX_WIDTH)))


def matching(sections: Sequence[SectionReference], topic: str) -> tuple[SectionReference, ...]:
    """Return the section of this name with its subsections, or the key of this name, or all keys that mention it."""
    name = topic.strip().removesuffix(".")
    inside = [
        section for section in sections if section.name == name or section.name.startswith((f"{name}.", f"{name}["))
    ]
    if inside:
        return tuple(inside)
    return (
        _only(sections, lambda key: key.key == name)
        or _only(sections, lambda key: key.key in other_names().get(name.lstrip("-").replace("-", "_"), ()))
        or _only(sections, lambda key: name.lower() in f"{key.key} {key.values} {key.description}".lower())
    )


def _only(
    sections: Sequence[SectionReference], matches: Callable[[KeyReference], bool]
) -> tuple[SectionReference, ...]:
    """Return the sections reduced to the keys that match, without empty ones."""
    cut = (replace(section, keys=tuple(filter(matches, section.keys))) for section in sections)
    return tuple(section for section in cut if section.keys)


def index_text(sections: Sequence[SectionReference]) -> str:
    """Format a line per key: name, default and first sentence of its text."""
    rows = [("key", "default", "meaning")]
    for section in sections:
        rows += [(key.key, key.default, first_sentence(key.description)) for key in section.keys]
    return align_columns(rows)


def manual_text(sections: Sequence[SectionReference], width: int) -> str:
    """Format the whole text of each key, in paragraphs of this width under their sections."""
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


def precision_lines(precision: str, plan: Plan) -> list[str]:
    """Return a line with bf16's measured gain, a hint that bf16 may be worth measuring, or what precision=auto will do;
    [] if none applies."""
    flags = [flag for flag in plan.machine.isa if "bf16" in flag]
    if precision == "auto" and not flags:
        return ["precision=auto will be float32: this processor has no instructions for bf16"]
    if precision == "auto":
        return [
            f"precision=auto: a training's start measures some steps, and takes bf16 from {AUTO_BF16_GAIN} times the "
            "speed on; planned as float32, which needs more memory"
        ]
    if precision != "float32" or not flags:
        return []
    rate = plan.measured.rate(BF16)
    if rate is None:
        return [
            f"precision=bf16 may be faster: this processor has instructions for it ({', '.join(flags)}); a training's "
            "start measures the gain"
        ]
    return [f"{bf16_line(rate.value)} (measured on {rate.date})"] if rate.value >= BF16_GAIN else []


def derivation(recipe: Recipe, *, ppn: int, nodes: int, with_curve: bool) -> str:
    """Format the recipe's sizes and how they follow from its settings, optionally with a learning-rate curve.

    Images are counted, or their number taken from the recipe if it is set there.
    """
    if recipe.data.images_per_epoch and not recipe.data.generated:
        images = recipe.data.images_per_epoch
    elif recipe.data.generated or (recipe.data.path and Path(recipe.data.path).exists()):
        images = survey_data(recipe.data).train
    elif recipe.data.train_images:
        images = recipe.data.train_images
    else:
        path = recipe.data.path
        missing = "has no data.path" if path is None else f"has its data in {path}, which does not exist here"
        return f"recipe {recipe.name} {missing}: the number of steps depends on the number of images"
    sizes = derive(recipe, ppn=ppn, nodes=nodes, images=images)
    text = f"recipe {recipe.name}\n" + aligned(explain(recipe, sizes, ppn=ppn, nodes=nodes))
    if warning := sizes.rate_warning:
        text += f"\nwarning: {warning}"
    if with_curve:
        schedule = schedule_of(recipe.schedule, recipe.phases, sizes)
        rates = sampled(lambda step: lr_at(step, schedule), sizes.total_steps)
        text += "\n\nlearning rate\n" + curve(rates, f"{recipe.epochs} epochs")
    return text


def aligned(reasons: list[Reason]) -> str:
    """Format a line per value: its name, the value and the reason."""
    return align_columns([(f"  {r.what}", f"{r.value}: {r.why}") for r in reasons])
