"""Recipes: a training as data.

schema (keys, types, descriptions), keys and errors (paths and messages about them), loading (YAML files, key=value
settings), rates and derivation (batch, steps and peak rate for a number of workers), explanation (the same in words),
phases (settings of an epoch), reference (all keys as data).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cputrain.recipe.derivation import TrainingSizes, derive
    from cputrain.recipe.explanation import explain
    from cputrain.recipe.loading import load_recipe
    from cputrain.recipe.schema import Recipe

__all__ = ["Recipe", "TrainingSizes", "derive", "explain", "load_recipe"]

MODULES = {
    "Recipe": "schema",
    "TrainingSizes": "derivation",
    "derive": "derivation",
    "explain": "explanation",
    "load_recipe": "loading",
}


def __getattr__(name: str) -> Any:
    """A public name, from its module at first use, so that importing one module does not import them all."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
