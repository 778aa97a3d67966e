"""Recipe keys: their list, their documentation, and validation errors as text."""

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from cputrain.affinity.filesystem import read_yaml
from cputrain.affinity.wording import first_sentence, join_or
from cputrain.recipe.schema import MISFIT, Recipe, Section
from cputrain.settings import MAX_COUNT

Keys = tuple[str, ...]
"""The path of a key: ("batch", "local") is batch.local."""

# pydantic's error types -> the expected value; {} is the limit.
REQUIRED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list, as in [a, b]",
    "dict_type": "keys with their values",
    "greater_than_equal": "{} or more",
    "greater_than": "more than {}",
    "less_than_equal": "{} or less",
    "less_than": "less than {}",
}

TRAIN_OPTIONS = ("dry-run", "no-verify", "overwrite", "quiet", "restarts", "resume")  # of cputrain train, no keys
TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false", NoneType: "null"}
LIMITS = {"ge": "{:g} or more", "gt": "more than {:g}", "le": "{:g} or less", "lt": "less than {:g}"}


@cache
def other_names() -> dict[str, list[str]]:
    """Return the names of keys in other trainers -> the keys here."""
    return cast(dict[str, list[str]], read_yaml(Path(__file__).with_name("other_names.yaml")))


def plain(name: str) -> str:
    """Return a name in small letters without hyphens and underscores: batch-size, batch_size and batchSize are one."""
    return name.lower().replace("-", "").replace("_", "")


def keys_elsewhere(name: str) -> list[str]:
    """Return the keys here that have this name, in any spelling, in other trainers."""
    return next((list(keys) for other, keys in other_names().items() if plain(other) == plain(name)), [])


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section that a field's type is or is a list of; None for a type of values."""
    inner = get_args(annotation)[0] if get_origin(annotation) is tuple else annotation
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


def fields_of(keys: Keys) -> Keys:
    """Return the keys of the section at this path, ("0",) for a list of sections, () for a value."""
    annotation = annotation_of(keys)
    section = section_of(annotation)
    if section is None:
        return ()
    if get_origin(annotation) is tuple:
        return ("0",)
    return tuple(field.alias or name for name, field in section.model_fields.items())


def annotation_of(keys: Keys) -> Any:
    """Return the type at this path; Any if the path is unknown."""
    if not keys:
        return Recipe
    field = field_at(keys)
    if field is not None:
        return field.annotation
    parent = annotation_of(keys[:-1])
    return get_args(parent)[0] if get_origin(parent) is tuple else Any  # tuple[Section, ...] is reached by an index


def field_at(keys: Keys) -> FieldInfo | None:
    """Return the schema's field at this path; None for an unknown path or an item of a list."""
    if not keys:
        return None
    fields = getattr(annotation_of(keys[:-1]), "model_fields", {})
    return next((field for name, field in fields.items() if (field.alias or name) == keys[-1]), None)


@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings below the fields of a module's classes, by the names of class and field."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        (section.name, field.target.id): inspect.cleandoc(text.value.value)
        for section in ast.walk(tree)
        if isinstance(section, ast.ClassDef)
        for field, text in pairwise(section.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def description_of(section: type[Section], name: str) -> str:
    """Return the docstring below a section's field, or the description of a planning option; "" if there is none."""
    owners = (base for base in section.__mro__ if base.__module__.startswith("cputrain."))
    texts = (_docstrings(owner.__module__).get((owner.__name__, name)) for owner in owners)
    return section.model_fields[name].description or next(filter(None, texts), "")


def known_path(location: Iterable[int | str]) -> Keys:
    """Return the keys in the location of a pydantic error, without the parts that pydantic adds below a value."""
    keys: Keys = ()
    for part in location:
        fields = fields_of(keys)
        if not fields:
            break
        keys += (str(part),)
        if part not in fields and not isinstance(part, int):
            break
    return keys


def all_keys(section: type[Section] = Recipe, above: Keys = ()) -> list[str]:
    """Return every key of a recipe, dotted, except the keys of phases, which repeat others."""
    dotted: list[str] = []
    for name, field in section.model_fields.items():
        path = (*above, field.alias or name)
        inner = field.annotation
        dotted.append(".".join(path))
        if isinstance(inner, type) and issubclass(inner, Section):
            dotted += all_keys(inner, path)
    return dotted


def similar_keys(keys: Keys, value: Any) -> list[str]:
    """Return up to three keys that an unknown key may mean: keys of the same name in other sections, keys that have
    this name in other trainers, or keys of similar spelling, first in the same section."""
    *above, last = keys
    every = all_keys()
    similar = [key for key in every if plain(key.rpartition(".")[2]) == plain(last)]
    if not similar and not isinstance(value, dict):
        similar = keys_elsewhere(last)
    if not similar:
        siblings = fields_of(tuple(above))
        similar = [".".join((*above, near)) for near in get_close_matches(last, siblings, n=1, cutoff=0.65)]
    if not similar:
        by_last = {key.rpartition(".")[2]: key for key in every}
        similar = [by_last[near] for near in get_close_matches(last, by_last, n=1, cutoff=0.75)]
    return similar[:3]


def describe_key(keys: Keys) -> str:
    """Return the first sentence of a key's description, without its period; "" if it has none."""
    section = annotation_of(keys[:-1])
    fields = getattr(section, "model_fields", {}) if keys else {}
    name = next((name for name, field in fields.items() if (field.alias or name) == keys[-1]), None)
    return "" if name is None else first_sentence(description_of(section, name)).partition("; ")[0]


def explain_error(error: ValidationError, path: Path, tree: yaml.Node | None, settings: Mapping[Keys, str]) -> str:
    """Return a recipe's first error as one line. `settings` maps keys to the settings that override the file."""
    errors = error.errors()
    first = errors[0]
    if first["type"] == MISFIT:
        involved = [tuple(key.split(".")) for key in first["ctx"]["keys"]]
        set_by_user = (keys for keys in involved if keys in settings or has_line(tree, keys))
        return f"{_place(next(set_by_user, involved[0]), path, tree, settings)}: {first['msg']}"
    keys = known_path(first["loc"])
    dotted, location = ".".join(keys), _place(keys, path, tree, settings)
    if first["type"] == "extra_forbidden":
        return f"{location}: unknown key {shortened(dotted)!r}: {_suggestion(keys, first['input'])}"
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{location}: {_not_a_section(keys, first['input'])}"
    if first["type"] == "missing" and len(first["loc"]) == len(keys):
        return f"{location}: {dotted} is missing: give it a value{_meaning(keys)}"
    same = [error for error in errors if known_path(error["loc"]) == keys]
    return f"{location}: {_wrong_value(keys, same)}"


def _place(keys: Keys, path: Path, tree: yaml.Node | None, settings: Mapping[Keys, str]) -> str:
    """Return the setting that sets this key or a part of it, or else the file and line."""
    lengths = {part: min(len(part), len(keys)) for part in settings if keys}
    setting = next((settings[part] for part, length in lengths.items() if part[:length] == keys[:length]), None)
    return f"setting {shortened(setting)!r}" if setting else f"{path}:{line_of(tree, keys)}"


def shortened(text: str) -> str:
    """Shorten a text to at most 100 characters."""
    return text if len(text) <= 100 else f"{text[:97]}..."


def _wrong_value(keys: Keys, errors: Sequence[ErrorDetails]) -> str:
    """Return which values a key takes, one phrase per type, and the value found."""
    first, dotted = errors[0], ".".join(keys)
    value = as_yaml(first["input"])
    if first["type"] == "value_error":
        return f"{dotted}={value}: {first['msg'].removeprefix('Value error, ')}"
    if first["type"] in ("missing", "too_long", "too_short"):
        count = len(get_args(annotation_of(keys)))
        return f"{dotted} must be a list of {count} values, not {value}{_meaning(keys)}"
    allowed = [_required(error) for error in errors]
    if NoneType in get_args(annotation_of(keys)):
        allowed.append("null")
    inside = [part for part in first["loc"][len(keys) :] if isinstance(part, int) or _is_dotted_key(part)]
    items = [f"item {part + 1} of " if isinstance(part, int) else f"{part} of " for part in reversed(inside)]
    return f"{''.join(items)}{dotted} must be {', or '.join(dict.fromkeys(allowed))}, not {value}{_meaning(keys)}"


def _meaning(keys: Keys) -> str:
    """Return what the key means, in parentheses; "" if the schema does not describe it."""
    text = describe_key(keys)
    if text[1:2].islower():
        text = text[0].lower() + text[1:]
    return text and f" ({text})"


def _is_dotted_key(part: int | str) -> bool:
    """Return whether a part of an error's location is a key of sweep.grid, rather than pydantic's name of a type."""
    return isinstance(part, str) and part.split(".")[0] in Recipe.model_fields and part not in ("int", "float", "str")


def _required(error: ErrorDetails) -> str:
    limits = error.get("ctx", {})
    if error["type"] == "literal_error":
        return str(limits["expected"]).replace("'", "")
    if error["type"] not in REQUIRED:
        return error["msg"]
    limit = next((limits[name] for name in ("ge", "gt", "le", "lt") if name in limits), "")
    return REQUIRED[error["type"]].format(f"{limit:g}" if isinstance(limit, float) else limit)


def _not_a_section(keys: Keys, value: Any) -> str:
    """Return the error for a value in place of a section: the key that was probably meant, or the section's keys."""
    dotted, inside = ".".join(keys), fields_of(keys)
    meant = [f"{dotted}.name"] if "name" in inside else keys_elsewhere(dotted)
    if meant and isinstance(value, str):
        return f"{dotted} is a section: did you mean {meant[0]}={value}?"
    return f"{dotted} is a section, not {as_yaml(value)}: set its keys {', '.join(inside)}"


def _suggestion(keys: Keys, value: Any) -> str:
    """Return the keys or the option that an unknown key may mean, or all keys of its section."""
    if option := next((name for name in TRAIN_OPTIONS if plain(name) == plain(keys[-1])), None):
        return f"did you mean the option --{option} of cputrain train?"
    similar = similar_keys(keys, value)
    if similar:
        return f"did you mean {join_or([repr(key) for key in similar])}?"
    return f"known keys: {', '.join(fields_of(keys[:-1]))}"


def as_yaml(value: Any) -> str:
    """Return a value as YAML on one line of at most 80 characters."""
    text = yaml.safe_dump(_lists(value), default_flow_style=True, width=float("inf"), sort_keys=False)
    text = text.strip().removesuffix("...").strip()
    return text if len(text) <= 80 else f"{text[:77]}..."


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, tuple | list) else value


def has_line(tree: yaml.Node | None, keys: Keys) -> bool:
    """Return whether the file has this key."""
    return _walk(tree, keys)[1]


def line_of(tree: yaml.Node | None, keys: Keys) -> int:
    """Return the line of a key in the file, or of its nearest parent if the file does not have it."""
    return _walk(tree, keys)[0]


def _walk(tree: yaml.Node | None, keys: Keys) -> tuple[int, bool]:
    line, node = 1, tree
    for key in keys:
        if isinstance(node, yaml.SequenceNode) and int(key) < len(node.value):
            node = node.value[int(key)]
            line = node.start_mark.line + 1
            continue
        if not isinstance(node, yaml.MappingNode):
            return line, False
        entry = next(((k, v) for k, v in node.value if k.value == key), None)
        if entry is None:
            return line, False
        line, node = entry[0].start_mark.line + 1, entry[1]
    return line, True


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyReference:
    """Documentation of a key as the user writes it ("phases[].crop"): allowed values, default and description."""

    key: str
    values: str
    default: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionReference:
    """Documentation of a section ("batch"; "" for the top level): description and keys, without inner sections."""

    name: str
    description: str
    keys: tuple[KeyReference, ...]


def reference() -> tuple[SectionReference, ...]:
    """Return every section of a recipe, each before the sections inside it."""
    return tuple(_sections("", Recipe))


def _sections(prefix: str, section: type[Section]) -> Iterator[SectionReference]:
    keys, inside = [], []
    for name, field in section.model_fields.items():
        key, inner = prefix + (field.alias or name), section_of(field.annotation)
        if inner is not None:
            inside.append((f"{key}." if inner is field.annotation else f"{key}[].", inner))
        if inner is not field.annotation:
            keys.append(_key(key, field, description_of(section, name)))
    yield SectionReference(name=prefix.removesuffix("."), description=_joined(section.__doc__), keys=tuple(keys))
    for below, inner in inside:
        yield from _sections(below, inner)


def _key(key: str, field: FieldInfo, description: str) -> KeyReference:
    limits = " and ".join(filter(None, map(_limits, field.metadata)))
    return KeyReference(
        key=key,
        values=", ".join(filter(None, (describe_type(field.annotation), limits))),
        default="required" if field.is_required() else _as_yaml(field.default),
        description=_joined(description),
    )


def describe_type(annotation: Any) -> str:
    """Return the values of a type as text: "whole number, 1 or more, or auto"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in TYPES:
        return TYPES[annotation]
    if section_of(annotation) is not None:
        return "list of sections"
    if origin is Literal:
        return join_or(arguments)
    if origin is Annotated:
        limits = " and ".join(filter(None, map(_limits, arguments[1:])))
        return f"{describe_type(arguments[0])}, {limits}" if limits else describe_type(arguments[0])
    if origin is dict:
        return f"keys, each with a {describe_type(arguments[1])}"
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        item = describe_type(arguments[0])
        return f"list of {count}{item.replace('number', 'numbers', 1) if item.startswith('number') else 'values'}"
    return join_or([describe_type(argument) for argument in arguments])


def _limits(metadata: Any) -> str:
    """Return the limits in a type's metadata as text; pydantic keeps them in a FieldInfo or one by one. MAX_COUNT,
    which only catches typing errors, is left out."""
    items = metadata.metadata if isinstance(metadata, FieldInfo) else [metadata]
    limits = ((text, getattr(item, name, None)) for item in items for name, text in LIMITS.items())
    return " and ".join(text.format(limit) for text, limit in limits if limit is not None and limit < MAX_COUNT)


def _as_yaml(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, default_style='"' if value == "" else None).strip()
    return text.removesuffix("...").strip()


def _joined(text: str | None) -> str:
    return " ".join((text or "").split())
