"""Load recipes from YAML files and settings, and shipped recipes by name.

Values follow YAML 1.2's core schema. PyYAML reads YAML 1.1, in which 0123 is octal, 2026-11-22 a date, 1:30 ninety and
yes true.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain, islice
from mimetypes import guess_type
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import first_sentence, join_or
from cputrain.files import RECIPES, recipe_names
from cputrain.recipe.keys import Keys, annotation_of, explain_error, shortened
from cputrain.recipe.schema import Recipe

MAX_BYTES = 100_000  # of a recipe file; the largest shipped one has 4,000
MAX_DEPTH = 16
MAX_DIGITS = 18
# YAML 1.2.2, 10.3.2: the core schema.
NULL = re.compile(r"null|Null|NULL|~|")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+")
BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
SPECIAL = {".nan": "nan", ".inf": "inf", "+.inf": "inf", "-.inf": "-inf"}
MAX_FILES_CHECKED = 10_000  # files of a folder to check for images

# Keys that apply only to the value of another key in the same file, and are dropped if a setting replaces that value.
# Dependent key -> the other key, and whether its new value makes the dependent key meaningless.
DEPENDENT_KEYS: dict[Keys, tuple[Keys, Callable[[Any], bool]]] = {
    ("schedule", "reference_batch"): (("schedule", "peak_rate"), lambda rate: True),
    ("schedule", "auto_rate_factor"): (("schedule", "peak_rate"), lambda rate: rate != "auto"),
    ("batch", "accumulation"): (("batch", "global"), lambda batch: batch is not None),
}

# The lines of a file's comment at which source, results and derivation begin.
REST = re.compile(r"^(Source|Sources|Published|Expected|On [\d,]+ host)", re.MULTILINE)


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects aliases (which can expand to gigabytes), tags and deep nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _yaml_error(f"*{event.anchor} is an alias; write out its value", event)
        if event.tag is not None:
            raise _yaml_error(f"{event.tag} is a tag; remove it", event)
        if self.depth >= MAX_DEPTH:
            raise _yaml_error(f"more than {MAX_DEPTH} levels of nesting", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {}  # `value_of` resolves types


def _yaml_error(problem: str, at: Any) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


@lru_cache(64)  # a sweep reads its recipe once for each training
def compose(text: str) -> yaml.Node | None:
    """Parse a document into nodes, which nobody may change; None if it is empty.

    Raises YAMLError for invalid YAML and for features that recipes do not use.
    """
    node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    return node


def value_of(node: yaml.Node | None, keys: Keys = ()) -> Any:
    """Return the value of a node at these keys: lists as tuples, and plain text if the schema allows only text.

    Raises YAMLError for a key that is not text or occurs twice, and for a number that is too long.
    """
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _yaml_error("a key is a list or a section, write `key: value`", key)
            if key.value in values:
                raise _yaml_error(f"the key {key.value[:60]!r} occurs twice, remove one", key)
            values[key.value] = value_of(value, (*keys, key.value))
        return values
    if isinstance(node, yaml.SequenceNode):
        return tuple(value_of(item, (*keys, str(number))) for number, item in enumerate(node.value))
    if not isinstance(node, yaml.ScalarNode):
        return None
    return node.value if node.style else _plain(node, annotation_of(keys))


def setting_value(text: str, keys: Keys) -> Any:
    """Return the value of KEY=TEXT: the text itself if it is unquoted and the schema allows only text, else YAML's."""
    annotation = annotation_of(keys)
    quoted = text.strip()[:1] in ("'", '"')
    if takes_text(annotation) and not quoted:
        return None if NoneType in get_args(annotation) and NULL.fullmatch(text.strip()) else text
    try:
        return value_of(compose(text), keys)
    except yaml.YAMLError:
        return text  # not YAML, such as a path with a colon or a quote


def takes_text(annotation: Any) -> bool:
    """Return whether a type allows only text, or null."""
    if annotation is str:
        return True
    if get_origin(annotation) is Literal:
        return all(isinstance(value, str) for value in get_args(annotation))
    parts = [part for part in get_args(annotation) if part is not NoneType]
    return get_origin(annotation) not in (tuple, dict) and bool(parts) and all(map(takes_text, parts))


def _plain(node: yaml.ScalarNode, annotation: Any) -> Any:
    """Convert an unquoted scalar to null, true or false, a number, or text."""
    text: str = node.value
    if takes_text(annotation):
        return None if NoneType in get_args(annotation) and NULL.fullmatch(text) else text
    if NULL.fullmatch(text):
        return None
    if BOOL.fullmatch(text):
        return text.lower() == "true"
    if INT.fullmatch(text) or BASED.fullmatch(text):
        if len(text.lstrip("+-0")) > MAX_DIGITS:
            raise _yaml_error(f"{text[:30]}... has more than {MAX_DIGITS} digits", node)
        return int(text, 0) if BASED.fullmatch(text) else int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    return float(SPECIAL[text.lower()]) if text.lower() in SPECIAL else text


def load_recipe(spec: str, settings: Sequence[str] = ()) -> Recipe:
    """Load the recipe of a file or a shipped name, and apply key=value settings.

    Raises InputError with file and line, or the setting, and the nearest key or name.
    """
    path = find_recipe(spec)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InputError(f"recipe {path} has more than {MAX_BYTES:,} bytes: give a recipe file")
        tree = compose(data.decode("utf-8-sig"))
        values = {} if tree is None else value_of(tree)
    except OSError as error:
        raise InputError(f"cannot read recipe {path}: {error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"recipe {path} is not UTF-8 ({error}): save it as UTF-8 text") from None
    except yaml.YAMLError as error:
        raise InputError(f"recipe {path} is not YAML: {_problem(error)}") from None
    if not isinstance(values, dict) and values is not None:
        raise InputError(f"recipe {path}:1 contains no keys: write one `key: value` per line")
    return recipe_of(values or {}, path, tree, settings)


def recipe_of(
    values: dict[str, Any], path: Path, tree: yaml.Node | None = None, settings: Sequence[str] = ()
) -> Recipe:
    """Return the recipe with these values and key=value settings. Raises InputError naming `path` or the setting."""
    by_keys: dict[Keys, str] = {}
    for setting in settings:
        keys, value = parse_setting(setting)
        set_key(values, keys, value, setting)
        by_keys[keys] = setting
    _drop_dependent_keys(values, by_keys)
    try:
        return Recipe.model_validate(tuples(values))
    except ValidationError as error:
        raise InputError(explain_error(error, path, tree, by_keys)) from None


def _problem(error: yaml.YAMLError) -> str:
    """Return YAML's error in one line, without the text around its position."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"in line {error.problem_mark.line + 1}, {' '.join(str(error.problem).split())[:200]}"
    return " ".join(str(error).split())[:200]


def _drop_dependent_keys(values: dict[str, Any], settings: Mapping[Keys, str]) -> None:
    """Remove, in place, the file's keys that apply only to a value which a setting has replaced."""
    for (section, key), (replaced, is_meaningless) in DEPENDENT_KEYS.items():
        if replaced in settings and (section, key) not in settings and is_meaningless(values[section][replaced[1]]):
            values[section].pop(key, None)


def find_recipe(spec: str) -> Path:
    """Return a recipe's file, by shipped name or by path. Raises InputError with the nearest names."""
    if spec in recipe_names():
        return RECIPES / f"{spec}.yaml"
    if not spec:
        raise InputError("the recipe name is empty: give an existing file, or a name that cputrain recipes lists")
    path = Path(spec)
    named_as_file = path.suffix in (".yaml", ".yml") or "/" in spec
    # os.path, because Path.is_file raises for a word that is too long for a path.
    if named_as_file and os.path.isfile(path) and path.suffix != ".py":  # noqa: PTH113
        return path
    if path.suffix == ".py":
        raise InputError(f"{spec} is a Python script, not a recipe: start it with cputrain launch {spec}")
    if os.path.isdir(path):  # noqa: PTH112
        raise InputError(f"{spec} is {_folder_of(path)}")
    if named_as_file:
        raise InputError(f"recipe file {spec} not found: give an existing file, or a name that cputrain recipes lists")
    raise InputError(f"unknown recipe {shortened(spec)!r}: {nearest_recipes(spec)}, or give a .yaml file")


def _folder_of(path: Path) -> str:
    """Return what a folder is that was given in place of a recipe, and what to do with it."""
    from cputrain.checkpoint.files import is_checkpoint

    if (path / "recipe.yaml").is_file():
        return f"the folder of a run: give its recipe, {path / 'recipe.yaml'}"
    of_run = os.path.normpath(path / "../../recipe.yaml")
    if is_checkpoint(path) and Path(of_run).is_file():
        return f"a checkpoint: give the recipe of its run, {of_run}"
    if is_checkpoint(path):
        return "a checkpoint, not a recipe: cputrain eval, predict and export take it"
    files = islice(chain(path.glob("*/*"), path.glob("train/*/*")), MAX_FILES_CHECKED)
    if any((guess_type(file.name)[0] or "").startswith("image/") for file in files):
        return f"a folder, not a recipe: cputrain train imagefolder data.path={path} trains on the images in it"
    return "a folder, not a recipe: cputrain recipes lists those included"


def nearest_recipes(name: str) -> str:
    """Return the shipped names that resemble or contain a name, and the command that lists all."""
    names = recipe_names()
    near = get_close_matches(name, names, n=3, cutoff=0.5) or [each for each in names if name.lower() in each][:3]
    listed = "cputrain recipes lists all of them"
    if not near:
        return listed
    return f"did you mean {join_or(near)}? {listed}"


class Dumper(yaml.SafeDumper):
    """Writes repeated values in full, because recipes have no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump_recipe(recipe: Recipe) -> str:
    """Return the complete recipe as YAML, which `load_recipe` loads to an equal recipe."""
    return yaml.dump(recipe.model_dump(mode="json", by_alias=True), Dumper=Dumper, sort_keys=False)


def input_settings(recipe: Recipe) -> tuple[str, ...]:
    """Return KEY=VALUE with the absolute path of each relative input path, for use in any working directory."""
    absolute = recipe.with_absolute_paths()
    paths = (
        ("data.path", recipe.data.path, absolute.data.path),
        ("data.stage_dir", recipe.data.stage_dir, absolute.data.stage_dir),
        ("model.weights", recipe.model.weights, absolute.model.weights),
    )
    moved = ((key, new) for key, old, new in paths if new != old)
    return tuple(f"{key}={new if parse_setting(f'{key}={new}')[1] == new else json.dumps(new)}" for key, new in moved)


def parse_setting(setting: str) -> tuple[Keys, Any]:
    """Parse "batch.local=16" to (("batch", "local"), 16). Raises InputError."""
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise InputError(f"setting {shortened(setting)!r} is not key=value, as in batch.local=16")
    keys = tuple(key.split("."))
    return keys, setting_value(text, keys)


def set_key(values: dict[str, Any], keys: Keys, value: Any, setting: str) -> None:
    """Set a nested key in place. Raises InputError if a part of the path is a value."""
    for key in keys[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise InputError(f"setting {shortened(setting)!r}: {shortened(key)} is a value, not a section")
    values[keys[-1]] = value


def tuples(value: Any) -> Any:
    """Convert YAML's lists to tuples, which strict validation requires."""
    if isinstance(value, dict):
        return {key: tuples(item) for key, item in value.items()}
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedRecipe:
    """Shipped recipe: a one-sentence summary, its file and its main settings."""

    name: str
    summary: str
    file: str
    network: str
    optimizer: str
    epochs: int
    data: str | None


def shipped_recipes() -> tuple[ShippedRecipe, ...]:
    """Return all shipped recipes, sorted by name."""
    return tuple(map(shipped_recipe, recipe_names()))


def shipped_recipe(name: str) -> ShippedRecipe:
    """Return the shipped recipe of this name. Raises InputError with the nearest names."""
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
    """Return the first sentence of the comment at the top of a recipe's file, without the command at its end."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    text = "\n".join(line.lstrip("# ") for line in lines[:end])
    return first_sentence(REST.split(text)[0]).partition(": cputrain ")[0].removesuffix(":")
