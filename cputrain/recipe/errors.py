"""Errors in a recipe as one line each: the place, the value found, and what to set instead."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from affinity.wording import either
from cputrain.recipe.keys import Keys, annotation_of, describe_key, fields_of, known_path, similar_keys
from cputrain.recipe.schema import Recipe
from cputrain.recipe.schema.base import MISFIT

# pydantic's error types -> the required value; {} is the limit.
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


def explain_error(error: ValidationError, path: Path, tree: yaml.Node | None, settings: Mapping[Keys, str]) -> str:
    """The first error of a recipe, as one line. `settings` are those on top of the file, by their keys."""
    errors = error.errors()
    first = errors[0]
    if first["type"] == MISFIT:
        involved = [tuple(key.split(".")) for key in first["ctx"]["keys"]]
        set_by_user = (keys for keys in involved if keys in settings or has_line(tree, keys))
        return f"{_place(next(set_by_user, involved[0]), path, tree, settings)}: {first['msg']}"
    keys = known_path(first["loc"])
    dotted, place = ".".join(keys), _place(keys, path, tree, settings)
    if first["type"] == "extra_forbidden":
        return f"{place}: unknown key {shortened(dotted)!r}: {_suggestion(keys, first['input'])}"
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{place}: {_not_a_section(keys, first['input'])}"
    if first["type"] == "missing" and len(first["loc"]) == len(keys):
        return f"{place}: {dotted} is missing: give it a value{_meaning(keys)}"
    same = [each for each in errors if known_path(each["loc"]) == keys]
    return f"{place}: {_wrong_value(keys, same)}"


def _place(keys: Keys, path: Path, tree: yaml.Node | None, settings: Mapping[Keys, str]) -> str:
    """The setting that sets this key, or a part of it, or else the file and the line."""
    lengths = {other: min(len(other), len(keys)) for other in settings if keys}
    setting = next((settings[other] for other, length in lengths.items() if other[:length] == keys[:length]), None)
    return f"setting {shortened(setting)!r}" if setting else f"{path}:{line_of(tree, keys)}"


def shortened(text: str) -> str:
    """A text of at most 100 characters."""
    return text if len(text) <= 100 else f"{text[:97]}..."


def _wrong_value(keys: Keys, errors: Sequence[ErrorDetails]) -> str:
    """The values that a key takes, one phrase for each type, and the value found."""
    first, dotted = errors[0], ".".join(keys)
    found = as_yaml(first["input"])
    if first["type"] == "value_error":
        return f"{dotted}={found}: {first['msg'].removeprefix('Value error, ')}"
    if first["type"] in ("missing", "too_long", "too_short"):
        count = len(get_args(annotation_of(keys)))
        return f"{dotted} must be a list of {count} values, not {found}{_meaning(keys)}"
    allowed = [_required(each) for each in errors]
    if NoneType in get_args(annotation_of(keys)):
        allowed.append("null")
    inside = [part for part in first["loc"][len(keys) :] if isinstance(part, int) or _is_dotted_key(part)]
    places = [f"item {part + 1} of " if isinstance(part, int) else f"{part} of " for part in reversed(inside)]
    return f"{''.join(places)}{dotted} must be {', or '.join(dict.fromkeys(allowed))}, not {found}{_meaning(keys)}"


def _meaning(keys: Keys) -> str:
    """What the key is, in parentheses; "" where the schema has no description."""
    text = describe_key(keys)
    if text[1:2].islower():
        text = text[0].lower() + text[1:]
    return text and f" ({text})"


def _is_dotted_key(part: int | str) -> bool:
    """Whether a part of an error's location is a key of sweep.grid, not pydantic's name of a type."""
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
    """A value in place of a section: the key that was probably meant, or the section's keys."""
    dotted, inside = ".".join(keys), fields_of(keys)
    if "name" in inside and isinstance(value, str):
        return f"{dotted} is a section: did you mean {dotted}.name={value}?"
    return f"{dotted} is a section, not {as_yaml(value)}: set its keys: {', '.join(inside)}"


def _suggestion(keys: Keys, value: Any) -> str:
    """The keys that an unknown key may stand for, or all keys of its section."""
    similar = similar_keys(keys, value)
    if similar:
        return f"did you mean {either([repr(key) for key in similar])}?"
    return f"known keys: {', '.join(fields_of(keys[:-1]))}"


def as_yaml(value: Any) -> str:
    """A value as YAML on one line of at most 80 characters."""
    text = yaml.safe_dump(_lists(value), default_flow_style=True, width=float("inf"), sort_keys=False)
    text = text.strip().removesuffix("...").strip()
    return text if len(text) <= 80 else f"{text[:77]}..."


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, tuple | list) else value


def has_line(tree: yaml.Node | None, keys: Keys) -> bool:
    """Whether the file has this key."""
    return _walk(tree, keys)[1]


def line_of(tree: yaml.Node | None, keys: Keys) -> int:
    """The line of a key in the file, or of the nearest key above it where the file does not have it."""
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
        found = next(((k, v) for k, v in node.value if k.value == key), None)
        if found is None:
            return line, False
        line, node = found[0].start_mark.line + 1, found[1]
    return line, True
