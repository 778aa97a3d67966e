"""Reading recipes from files and key=value settings, and writing them."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain, islice
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from affinity.errors import InputError
from affinity.topology.catalog import shipped
from cputrain.recipe.errors import explain_error, shortened
from cputrain.recipe.keys import Keys
from cputrain.recipe.schema import Recipe
from cputrain.recipe.yaml_text import MOST_BYTES, compose, setting_value, value_of

RECIPES = shipped(Path(__file__).parents[1], "recipes")
MOST_LOOKED_AT = 10_000  # files of a folder, for images

# Keys of a file that belong to another key's value there: a setting that replaces only that value drops them. Dependent
# key -> the other key, and whether its new value makes the dependent key meaningless.
DEPENDENT_KEYS: dict[Keys, tuple[Keys, Callable[[Any], bool]]] = {
    ("schedule", "reference_batch"): (("schedule", "peak_rate"), lambda rate: True),
    ("schedule", "auto_rate_factor"): (("schedule", "peak_rate"), lambda rate: rate != "auto"),
    ("batch", "accumulation"): (("batch", "global"), lambda batch: batch is not None),
}


def load_recipe(spec: str, settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a file or a shipped name, with key=value settings on top.

    Raises InputError with file and line, or the setting, and the nearest key or name.
    """
    path = find_recipe(spec)
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise InputError(f"recipe {path} has more than {MOST_BYTES:,} bytes: name a recipe")
        tree = compose(data.decode("utf-8-sig"))
        values = {} if tree is None else value_of(tree)
    except OSError as error:
        raise InputError(f"cannot read recipe {path}: {error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"recipe {path} is not UTF-8: {error}: save it as UTF-8 text") from None
    except yaml.YAMLError as error:
        raise InputError(f"recipe {path} is not YAML: {_problem(error)}") from None
    if not isinstance(values, dict) and values is not None:
        raise InputError(f"recipe {path}:1 contains no keys: write one `key: value` per line")
    return recipe_of(values or {}, path, tree, settings)


def recipe_of(
    values: dict[str, Any], path: Path, tree: yaml.Node | None = None, settings: Sequence[str] = ()
) -> Recipe:
    """The recipe with these values and, on top, key=value settings. Raises InputError at `path`, or a setting."""
    by_keys: dict[Keys, str] = {}
    for setting in settings:
        keys, value = parse_setting(setting)
        put(values, keys, value, setting)
        by_keys[keys] = setting
    _drop_dependent_keys(values, by_keys)
    try:
        return Recipe.model_validate(tuples(values))
    except ValidationError as error:
        raise InputError(explain_error(error, path, tree, by_keys)) from None


def _problem(error: yaml.YAMLError) -> str:
    """What YAML says, in one line without the text around the place."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {' '.join(str(error.problem).split())[:200]}"
    return " ".join(str(error).split())[:200]


def _drop_dependent_keys(values: dict[str, Any], settings: Mapping[Keys, str]) -> None:
    """Remove, in place, the keys of the file that belong to a value which a setting has replaced."""
    for (section, key), (replaced, is_meaningless) in DEPENDENT_KEYS.items():
        if replaced in settings and (section, key) not in settings and is_meaningless(values[section][replaced[1]]):
            values[section].pop(key, None)


def find_recipe(spec: str) -> Path:
    """A recipe's file, by shipped name or by path. Raises InputError with the nearest names."""
    if spec in recipe_names():
        return RECIPES / f"{spec}.yaml"
    if not spec:
        raise InputError("recipe '' is empty: give an existing file, or a name that cputrain recipes lists")
    path = Path(spec)
    named_as_file = path.suffix in (".yaml", ".yml") or "/" in spec
    # os.path's: a word may be too long for a path, at which Path.is_file raises.
    if named_as_file and os.path.isfile(path) and path.suffix != ".py":  # noqa: PTH113
        return path
    if path.suffix == ".py":
        raise InputError(f"{spec} is a Python script, not a recipe: cputrain launch {spec} starts it with a plan")
    if os.path.isdir(path):  # noqa: PTH112
        raise InputError(f"{spec} is {_folder_of(path)}")
    if named_as_file:
        raise InputError(f"recipe file {spec} not found: give an existing file, or a name that cputrain recipes lists")
    raise InputError(f"unknown recipe {shortened(spec)!r}: {nearest_recipes(spec)}; or give a .yaml file")


def _folder_of(path: Path) -> str:
    """What a folder is that was given for a recipe, and what to do with it."""
    from cputrain.checkpoints.manifest import is_checkpoint

    if (path / "recipe.yaml").is_file():
        return f"the folder of a run: give its recipe, {path / 'recipe.yaml'}"
    of_run = os.path.normpath(path / "../../recipe.yaml")
    if is_checkpoint(path) and Path(of_run).is_file():
        return f"a checkpoint: give the recipe of its run, {of_run}"
    if is_checkpoint(path):
        return "a checkpoint, not a recipe: cputrain eval, predict and export take it"
    files = islice(chain(path.glob("*/*"), path.glob("train/*/*")), MOST_LOOKED_AT)
    if any((guess_type(file.name)[0] or "").startswith("image/") for file in files):
        return f"a folder, not a recipe: cputrain train imagefolder data.path={path} trains on the images in it"
    return "a folder, not a recipe: cputrain recipes lists those included"


def nearest_recipes(name: str) -> str:
    """The shipped names that resemble or contain a name, and what lists all."""
    names = recipe_names()
    near = get_close_matches(name, names, n=3, cutoff=0.5) or [each for each in names if name.lower() in each][:3]
    listed = "cputrain recipes lists all of them"
    if not near:
        return listed
    return f"the nearest {'name is' if len(near) == 1 else 'names are'} {', '.join(near)}; {listed}"


def recipe_names() -> list[str]:
    """The names of the shipped recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


class _Dumper(yaml.SafeDumper):
    """Writes values out as often as they occur: recipes have no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump_recipe(recipe: Recipe) -> str:
    """The complete recipe as YAML, which `load_recipe` reads back to the same value."""
    return yaml.dump(recipe.model_dump(mode="json", by_alias=True), Dumper=_Dumper, sort_keys=False)


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe with absolute paths, for use in any folder."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(Path(path).absolute())

    path = recipe.data.path if recipe.data.generated else absolute(recipe.data.path)
    data = recipe.data.model_copy(update={"path": path, "stage_dir": absolute(recipe.data.stage_dir)})
    model = recipe.model.model_copy(update={"weights": absolute(recipe.model.weights)})
    return recipe.model_copy(update={"data": data, "model": model, "output": str(recipe.folder.absolute())})


def input_settings(recipe: Recipe) -> tuple[str, ...]:
    """KEY=VALUE with the absolute path of each input that the recipe names by a relative one, for use in any folder."""
    absolute = with_absolute_paths(recipe)
    paths = (
        ("data.path", recipe.data.path, absolute.data.path),
        ("data.stage_dir", recipe.data.stage_dir, absolute.data.stage_dir),
        ("model.weights", recipe.model.weights, absolute.model.weights),
    )
    moved = ((key, new) for key, old, new in paths if new != old)
    return tuple(f"{key}={new if parse_setting(f'{key}={new}')[1] == new else json.dumps(new)}" for key, new in moved)


def parse_setting(setting: str) -> tuple[Keys, Any]:
    """ "batch.local=16" -> (("batch", "local"), 16)."""
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise InputError(f"setting {shortened(setting)!r} is not key=value, as in batch.local=16")
    keys = tuple(key.split("."))
    return keys, setting_value(text, keys)


def put(values: dict[str, Any], keys: Keys, value: Any, setting: str) -> None:
    """Set a nested key in place. Raises InputError where a part of the path is a value."""
    for key in keys[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise InputError(f"setting {shortened(setting)!r}: {shortened(key)} is a value, not a section")
    values[keys[-1]] = value


def tuples(value: Any) -> Any:
    """YAML's lists as tuples, which strict validation requires."""
    if isinstance(value, dict):
        return {key: tuples(item) for key, item in value.items()}
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value
