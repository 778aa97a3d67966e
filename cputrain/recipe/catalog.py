"""The shipped recipes: each with the sentence that its file begins with."""

import re
from dataclasses import dataclass
from pathlib import Path

from affinity.wording import first_sentence
from cputrain.recipe.loading import find_recipe, load_recipe, recipe_names

# Where the comment of a file goes on to its source, results and derivation.
REST = re.compile(r"^(Source|Sources|Published|Expected|On [\d,]+ host)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedRecipe:
    """An included recipe: what it trains in a sentence, its file with all comments, and its main settings."""

    name: str
    summary: str
    file: str
    network: str
    optimizer: str
    epochs: int
    data: str | None


def shipped_recipes() -> tuple[ShippedRecipe, ...]:
    """All shipped recipes, by name."""
    return tuple(map(shipped_recipe, recipe_names()))


def shipped_recipe(name: str) -> ShippedRecipe:
    """The shipped recipe of this name. Raises InputError with the nearest names."""
    path, recipe = find_recipe(name), load_recipe(name)
    return ShippedRecipe(
        name=name,
        summary=summary_of(path),
        file=str(path),
        network=recipe.model.name,
        optimizer=recipe.optim.name,
        epochs=recipe.epochs,
        data=recipe.data.path,
    )


def summary_of(path: Path) -> str:
    """The first sentence of the comment at the top of a recipe's file, without a command at its end."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    text = "\n".join(line.lstrip("# ") for line in lines[:end])
    return first_sentence(REST.split(text)[0]).partition(": cputrain ")[0].removesuffix(":")
