"""Recipes: a training as data.

schema (keys, types, descriptions), keys and errors (paths and messages about them), loading (YAML files, key=value
settings), rates and derivation (batch, steps and peak rate for a number of workers), explanation (the same in words),
phases (settings of an epoch), reference (all keys as data).
"""

from typing import TYPE_CHECKING

from cputrain.lazy import lazy_names

if TYPE_CHECKING:
    from cputrain.recipe.derivation import TrainingSizes, derive, explain
    from cputrain.recipe.loading import load_recipe
    from cputrain.recipe.schema import Recipe

__all__ = ["Recipe", "TrainingSizes", "derive", "explain", "load_recipe"]

__getattr__ = lazy_names(
    __name__,
    {
        "Recipe": "schema",
        "TrainingSizes": "derivation",
        "derive": "derivation",
        "explain": "explanation",
        "load_recipe": "loading",
    },
)
