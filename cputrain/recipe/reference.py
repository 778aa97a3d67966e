"""The reference of recipe keys as data: sections, and of each key its values, default and description."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from affinity.wording import either
from cputrain.recipe.keys import section_of
from cputrain.recipe.schema import Recipe
from cputrain.recipe.schema.base import MOST, Section

TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false", NoneType: "null"}
LIMITS = {"ge": "{:g} or more", "gt": "more than {:g}", "le": "{:g} or less", "lt": "less than {:g}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyReference:
    """A key as the user writes it ("phases[].crop"): the values that it takes, its default and its description."""

    key: str
    values: str
    default: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionReference:
    """A section ("batch"; "" for the top level) with its description and its own keys."""

    name: str
    description: str
    keys: tuple[KeyReference, ...]


def reference() -> tuple[SectionReference, ...]:
    """Every section of a recipe, each before those inside it."""
    return tuple(_sections("", Recipe))


def _sections(prefix: str, section: type[Section]) -> Iterator[SectionReference]:
    keys, inside = [], []
    for name, field in section.model_fields.items():
        key, inner = prefix + (field.alias or name), section_of(field.annotation)
        if inner is not None:
            inside.append((f"{key}." if inner is field.annotation else f"{key}[].", inner))
        if inner is not field.annotation:
            keys.append(_key(key, field))
    yield SectionReference(name=prefix.removesuffix("."), description=_joined(section.__doc__), keys=tuple(keys))
    for below, inner in inside:
        yield from _sections(below, inner)


def _key(key: str, field: FieldInfo) -> KeyReference:
    limits = " and ".join(filter(None, map(_limits, field.metadata)))
    return KeyReference(
        key=key,
        values=", ".join(filter(None, (describe_type(field.annotation), limits))),
        default="required" if field.is_required() else _as_yaml(field.default),
        description=_joined(field.description),
    )


def describe_type(annotation: Any) -> str:
    """The values of a type in words: "whole number, 1 or more, or auto"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in TYPES:
        return TYPES[annotation]
    if section_of(annotation) is not None:
        return "list of sections"
    if origin is Literal:
        return either(arguments)
    if origin is Annotated:
        limits = " and ".join(filter(None, map(_limits, arguments[1:])))
        return f"{describe_type(arguments[0])}, {limits}" if limits else describe_type(arguments[0])
    if origin is dict:
        return f"keys, each with a {describe_type(arguments[1])}"
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        item = describe_type(arguments[0])
        return f"list of {count}{item.replace('number', 'numbers', 1) if item.startswith('number') else 'values'}"
    return either([describe_type(each) for each in arguments])


def _limits(metadata: Any) -> str:
    """The limits in a type's metadata, which pydantic keeps in a FieldInfo or each by itself; not those that only stop
    slips of the keyboard."""
    kept = metadata.metadata if isinstance(metadata, FieldInfo) else [metadata]
    limits = ((text, getattr(each, name, None)) for each in kept for name, text in LIMITS.items())
    return " and ".join(text.format(limit) for text, limit in limits if limit is not None and limit < MOST)


def _as_yaml(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, default_style='"' if value == "" else None).strip()
    return text.removesuffix("...").strip()


def _joined(text: str | None) -> str:
    return " ".join((text or "").split())
