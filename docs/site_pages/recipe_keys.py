"""Page of the recipe keys, from the schema: the text under each field is its manual."""

from cputrain.recipe.keys import all_keys, reference
from site_pages.text import code, plain, table

INTRODUCTION = """# Recipe keys

A recipe is one YAML file with these keys. Each can also be set on the command line:
`cputrain train RECIPE batch.local=16`. `cputrain keys` prints them in a terminal. [Recipes](../guides/recipes.md)
explains batch, learning rate and optimizer.
"""


def recipe_keys() -> str:
    """Return a table for each section of a recipe: key, values, default, meaning."""
    parts = [INTRODUCTION]
    for section in reference():
        rows = [[code(key.key), *map(plain, (key.values, key.default, key.description))] for key in section.keys]
        title = section.name.removesuffix("[]") or "Top level"
        keys = table(["key", "values", "default", "meaning"], rows)
        parts.append(f"## {title}\n\n{plain(section.description)}\n\n{keys}\n")
    return "\n".join(parts)


def keys() -> set[str]:
    """Return every dotted recipe key."""
    return {*all_keys(), *(key.key for section in reference() for key in section.keys)}
