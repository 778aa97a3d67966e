"""Recipes: a training as data.

schema (sections, keys, types, their manual), keys (paths, messages and the reference), loading (YAML files, key=value
settings, shipped recipes), derivation (batch, steps, rates and phases for a number of workers, and the same in words).
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
        "explain": "derivation",
        "load_recipe": "loading",
    },
)
