"""How files and key=value settings become a recipe, and what is wrong with one in one line."""

import json
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from affinity.errors import InputError
from affinity.topology.catalog import shipped
from cputrain.recipe.errors import complaint
from cputrain.recipe.schema import Recipe

RECIPES = shipped(Path(__file__).parents[1], "recipes")

# What a file says that belongs to another of its values, and the new values of that with which it has no meaning: it
# goes where a setting gives one of those alone.
BELONGS_TO: dict[tuple[str, str], tuple[tuple[str, str], Callable[[Any], bool]]] = {
    ("schedule", "reference_batch"): (("schedule", "peak_rate"), lambda rate: True),
    ("schedule", "rate_factor"): (("schedule", "peak_rate"), lambda rate: rate != "auto"),
    ("batch", "accumulation"): (("batch", "global"), lambda batch: batch is not None),
}


class _Loader(yaml.SafeLoader):
    """PyYAML with YAML 1.2's floats, so that 5e-5 is a number."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+"), list("-+0123456789.")
)


def load_recipe(spec: str, settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a file or a shipped name, with key=value settings on top.

    Raises InputError with file and line (or the setting), and the nearest key or name.
    """
    path = find_recipe(spec)
    try:
        text = path.read_text()
        tree = yaml.compose(text, Loader=_Loader)
        values = yaml.load(text, Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read recipe {path}: {error}") from None
    except yaml.YAMLError as error:
        raise InputError(f"recipe {path} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise InputError(f"recipe {path}:1 holds no keys: a recipe is key: value lines")
    given: dict[tuple[str, ...], str] = {}
    for setting in settings:
        keys, value = parse_setting(setting)
        put(values, keys, value, setting)
        given[keys] = setting
    for (section, key), (replaced, excludes) in BELONGS_TO.items():
        if replaced in given and (section, key) not in given and excludes(values[section][replaced[1]]):
            values[section].pop(key, None)
    try:
        return Recipe.model_validate(tuples(values))
    except ValidationError as error:
        raise InputError(complaint(error, path, tree, given)) from None


def find_recipe(spec: str) -> Path:
    """A recipe's file, by path or by shipped name. Raises InputError with the nearest names."""
    path = Path(spec)
    if path.suffix in (".yaml", ".yml") or "/" in spec:
        if not path.is_file():
            raise InputError(f"recipe {spec} is not there: give a file, or a name: {', '.join(recipe_names())}")
        return path
    if spec not in recipe_names():
        near = get_close_matches(spec, recipe_names(), n=3, cutoff=0.3) or recipe_names()
        raise InputError(f"recipe {spec!r} is not known: nearest are {', '.join(near)}; or give a .yaml file")
    return RECIPES / f"{spec}.yaml"


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `load_recipe` reads back to the same value."""
    return str(yaml.safe_dump(recipe.model_dump(mode="json", by_alias=True), sort_keys=False))


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe, to be read from any folder."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(Path(path).absolute())

    path = recipe.data.path if recipe.data.generated else absolute(recipe.data.path)
    data = recipe.data.model_copy(update={"path": path, "stage": absolute(recipe.data.stage)})
    model = recipe.model.model_copy(update={"weights": absolute(recipe.model.weights)})
    return recipe.model_copy(update={"data": data, "model": model, "output": str(recipe.folder.absolute())})


def input_settings(recipe: Recipe) -> tuple[str, ...]:
    """KEY=VALUE for each file or folder that the recipe reads by a relative path, for a command in any folder."""
    there = with_absolute_paths(recipe)
    paths = (
        ("data.path", recipe.data.path, there.data.path),
        ("data.stage", recipe.data.stage, there.data.stage),
        ("model.weights", recipe.model.weights, there.model.weights),
    )
    moved = ((key, new) for key, old, new in paths if new != old)
    return tuple(f"{key}={new if parse_setting(f'{key}={new}')[1] == new else json.dumps(new)}" for key, new in moved)


def parse_setting(setting: str) -> tuple[tuple[str, ...], Any]:
    """ "batch.local=16" -> (("batch", "local"), 16)."""
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise InputError(f"setting {setting!r} is not key=value, as in batch.local=16")
    try:
        return tuple(key.split(".")), yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return tuple(key.split(".")), text  # a path with a colon or a quote in it: taken as it stands


def put(values: dict[str, Any], keys: tuple[str, ...], value: Any, setting: str) -> None:
    """Set a nested key in place. Raises InputError where the path runs through a value."""
    for key in keys[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise InputError(f"setting {setting!r}: {key} is a value, not a section")
    values[keys[-1]] = value


def tuples(value: Any) -> Any:
    """YAML's lists as tuples, which strict validation wants."""
    if isinstance(value, dict):
        return {key: tuples(item) for key, item in value.items()}
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value
