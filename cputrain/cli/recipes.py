"""cputrain recipes: list, search and show the shipped recipes."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from affinity.errors import InputError
from affinity.text_table import align_columns
from cputrain.cli.groups import catalog_group, command_or_list
from cputrain.cli.json_output import format_option, print_json
from cputrain.recipe.catalog import ShippedRecipe, shipped_recipe, shipped_recipes
from cputrain.recipe.loading import recipe_names

HEAD = ("recipe", "network", "optimizer", "epochs", "what it trains")


@click.group("recipes", cls=catalog_group(recipe_names), invoke_without_command=True)
@format_option
@click.pass_context
def command(context: click.Context, output_format: str) -> None:
    """List the included recipes, search them, or show one. Without a command: list them; NAME alone shows one,
    TEXT alone searches."""
    if context.invoked_subcommand is None:
        _show(shipped_recipes(), output_format)


@command.command("list")
@format_option
def list_recipes(output_format: str) -> None:
    """List all of them."""
    _show(shipped_recipes(), output_format)


@command.command("search")
@click.argument("text")
@format_option
def search(text: str, output_format: str) -> None:
    """List the recipes whose file contains TEXT, in any case: a network, a data set, an author, 32k."""
    found = [
        each
        for each in shipped_recipes()
        if text.lower() in f"{each.name}\n{Path(each.file).read_text(encoding='utf-8')}".lower()
    ]
    if not found:
        raise InputError(f"no shipped recipe contains {text!r}: {command_or_list(text)}")
    _show(found, output_format)


@command.command("show")
@click.argument("recipe", metavar="NAME")
@format_option
def show(recipe: str, output_format: str) -> None:
    """Print a recipe's file: its source, what was published, the derivation of its numbers, its settings."""
    found = shipped_recipe(recipe)
    text = Path(found.file).read_text(encoding="utf-8")
    if output_format == "json":
        print_json({**asdict(found), "text": text})
    else:
        click.echo(text, nl=False)


def _show(recipes: Sequence[ShippedRecipe], output_format: str) -> None:
    if output_format == "json":
        print_json({"recipes": [asdict(each) for each in recipes]})
        return
    rows = [(each.name, each.network, each.optimizer, str(each.epochs), each.summary) for each in recipes]
    click.echo(align_columns([HEAD, *rows]))
    click.echo("\ncputrain recipes show NAME prints one; cputrain train NAME trains it")
