"""What is wrong with a recipe, in one line: where, what was found, what to set instead."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cputrain.recipe.schema import Recipe
from cputrain.recipe.schema.base import MISFIT, Section

Keys = tuple[str, ...]

# What other trainers call our keys.
OTHER_NAMES = {
    "lr": ("schedule.peak_rate",),
    "learning_rate": ("schedule.peak_rate",),
    "base_lr": ("schedule.peak_rate",),
    "batch_size": ("batch.local", "batch.global"),
    "global_batch": ("batch.global",),
    "local_batch": ("batch.local",),
    "optimizer": ("optim.name",),
    "wd": ("optim.weight_decay",),
    "arch": ("model.name",),
    "network": ("model.name",),
    "dataset": ("data.path",),
    "data_dir": ("data.path",),
    "num_epochs": ("epochs",),
    "num_workers": ("plan.ppn",),
    "workers": ("plan.ppn",),
    "warmup": ("schedule.warmup_epochs",),
}

# pydantic's kinds of errors -> what the value must be; {} is the limit, or the allowed words.
MUST_BE = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "keys with their values",
    "greater_than_equal": "{} or more",
    "greater_than": "more than {}",
    "less_than_equal": "{} or less",
    "less_than": "less than {}",
}


def complaint(error: ValidationError, path: Path, tree: yaml.Node | None, given: Mapping[Keys, str]) -> str:
    """The first thing that is wrong with a recipe; `given` are the settings on top of the file, by their keys."""
    errors = error.errors()
    first = errors[0]
    if first["type"] == MISFIT:
        involved = [tuple(key.split(".")) for key in first["ctx"]["keys"]]
        set_by_user = (keys for keys in involved if keys in given or has_line(tree, keys))
        return f"{_where(next(set_by_user, involved[0]), path, tree, given)}: {first['msg']}"
    keys = known_path(first["loc"])
    dotted = ".".join(keys)
    where = _where(keys, path, tree, given)
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key {dotted!r}: {_nearest(keys, first['input'])}"
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{where}: {_not_a_section(keys, first['input'])}"
    if first["type"] == "missing" and len(first["loc"]) == len(keys):
        return f"{where}: {dotted} is missing: give it a value"
    same = [each for each in errors if known_path(each["loc"]) == keys]
    return f"{where}: {_wrong_value(keys, same)}"


def _where(keys: Keys, path: Path, tree: yaml.Node | None, given: Mapping[Keys, str]) -> str:
    lengths = {set_: min(len(set_), len(keys)) for set_ in given if keys}
    setting = next((given[set_] for set_, length in lengths.items() if set_[:length] == keys[:length]), None)
    return f"setting {setting!r}" if setting else f"{path}:{line_of(tree, keys)}"


def _wrong_value(keys: Keys, errors: Sequence[ErrorDetails]) -> str:
    """What a key's value must be, one phrase for each kind that it may have, and what was found."""
    first, dotted = errors[0], ".".join(keys)
    found = shown(first["input"])
    if first["type"] == "value_error":
        return f"{dotted}={found}: {first['msg'].removeprefix('Value error, ')}"
    if first["type"] in ("missing", "too_long", "too_short"):
        return f"{dotted} must be a list of {len(get_args(_annotation(keys)))} values, not {found}"
    told = [_must_be(each) for each in errors]
    if NoneType in get_args(_annotation(keys)):
        told.append("null")
    inside = [part for part in first["loc"][len(keys) :] if isinstance(part, int) or _dotted_key(part)]
    places = [f"item {part + 1} of " if isinstance(part, int) else f"{part} of " for part in reversed(inside)]
    return f"{''.join(places)}{dotted} must be {', or '.join(dict.fromkeys(told))}, not {found}"


def _dotted_key(part: int | str) -> bool:
    """Whether a part of an error's location is a key of sweep.grid, not pydantic's name of a kind of value."""
    return isinstance(part, str) and part.split(".")[0] in Recipe.model_fields and part not in ("int", "float", "str")


def _must_be(error: ErrorDetails) -> str:
    limits = error.get("ctx", {})
    if error["type"] == "literal_error":
        return str(limits["expected"]).replace("'", "")
    if error["type"] not in MUST_BE:
        return error["msg"]
    limit = next((limits[name] for name in ("ge", "gt", "le", "lt") if name in limits), "")
    return MUST_BE[error["type"]].format(f"{limit:g}" if isinstance(limit, int | float) else limit)


def _not_a_section(keys: Keys, value: Any) -> str:
    """A value where a section belongs: the key that was meant, if it can be told."""
    dotted, inside = ".".join(keys), fields_of(keys)
    if "name" in inside and isinstance(value, str):
        return f"{dotted} is a section: did you mean {dotted}.name={value}?"
    return f"{dotted} is a section, not {shown(value)}: set its keys: {', '.join(inside)}"


def _nearest(keys: Keys, value: Any) -> str:
    """The key that was probably meant: of the same name elsewhere, of another trainer's name, or of like letters."""
    *above, last = keys
    siblings, every = fields_of(tuple(above)), all_keys()
    elsewhere = [key for key in every if key.rpartition(".")[2] == last]
    known = elsewhere or [key for key in OTHER_NAMES.get(last, ()) if not isinstance(value, dict)]
    if not known:
        known = [".".join((*above, near)) for near in get_close_matches(last, siblings, n=1, cutoff=0.5)]
    if not known:
        by_last = {key.rpartition(".")[2]: key for key in every}
        known = [by_last[near] for near in get_close_matches(last, by_last, n=1, cutoff=0.75)]
    if known:
        return f"did you mean {' or '.join(map(repr, known[:3]))}?"
    return f"known here: {', '.join(siblings)}"


def all_keys() -> list[str]:
    """Every key of a recipe, dotted; those of phases are left out, whose values are the recipe's own."""

    def below(section: type[Section], keys: Keys) -> list[str]:
        found: list[str] = []
        for name, field in section.model_fields.items():
            path = (*keys, field.alias or name)
            inner = field.annotation
            found.append(".".join(path))
            if isinstance(inner, type) and issubclass(inner, Section):
                found += below(inner, path)
        return found

    return below(Recipe, ())


def known_path(location: Iterable[int | str]) -> Keys:
    """The keys of an error's location, without what pydantic adds below a value (union members, tuple indices)."""
    keys: Keys = ()
    for part in location:
        fields = fields_of(keys)
        if not fields:
            break
        keys += (str(part),)
        if part not in fields and not isinstance(part, int):
            break
    return keys


def fields_of(keys: Keys) -> Keys:
    """The keys of the section at this path; none where the path leads to a value."""
    section = _annotation(keys)
    inner = get_args(section)[:1] if get_origin(section) is tuple else (section,)
    if not all(isinstance(each, type) and issubclass(each, Section) for each in inner):
        return ()
    if get_origin(section) is tuple:
        return ("0",)
    return tuple(field.alias or name for name, field in section.model_fields.items())


def _annotation(keys: Keys) -> Any:
    """The type of what a path leads to; Any where it leads nowhere."""
    section: Any = Recipe
    for key in keys:
        if get_origin(section) is tuple:  # tuple[Section, ...] is reached by an index
            section = get_args(section)[0]
            continue
        fields = getattr(section, "model_fields", {})
        section = next((f.annotation for name, f in fields.items() if (f.alias or name) == key), Any)
    return section


def shown(value: Any) -> str:
    """A value as YAML has it on one line, cut where it is long."""
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
    """The line of a key in the file; that of the nearest key above it where the file does not have it."""
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
