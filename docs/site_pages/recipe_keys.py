"""The recipe's keys, from the schema: the text under each field is its manual."""

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from cputrain.recipe.schema import Recipe
from cputrain.recipe.schema.base import Section
from site_pages.text import code, plain, table

INTRODUCTION = """# Recipe keys

A recipe is one YAML file with these keys. Each can also be set on the command line:
`cputrain train RECIPE batch.local=16`. [Recipes](../guides/recipes.md) explains batch, learning rate and optimizer.
"""
NAMES = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false", "dict": "mapping"}


def recipe_keys() -> str:
    """A table for each section of a recipe: key, values, default, meaning."""
    parts = [INTRODUCTION]
    for path, section in sections("", Recipe):
        rows = [
            [code(f"{path}{field.alias or name}"), *map(plain, _described(field))]
            for name, field in section.model_fields.items()
            if _section_of(field.annotation) is None
        ]
        title = path.removesuffix(".").removesuffix("[]") or "Top level"
        doc = plain(" ".join((section.__doc__ or "").split()))
        parts.append(f"## {title}\n\n{doc}\n\n{table(['key', 'values', 'default', 'meaning'], rows)}\n")
    return "\n".join(parts)


def keys() -> set[str]:
    """Every key of a recipe with its dots."""
    all_sections = list(sections("", Recipe))
    return {f"{path}{field.alias or name}" for path, s in all_sections for name, field in s.model_fields.items()}


def sections(path: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """Every section with the prefix of its keys, a section before those inside it."""
    yield path, section
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None:
            several = "[]" if get_origin(field.annotation) is tuple else ""
            yield from sections(f"{path}{name}{several}.", inner)


def _section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, alone or several of."""
    inner = get_args(annotation)[0] if get_origin(annotation) is tuple else annotation
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


def _values(annotation: Any) -> str:
    """The values that a field takes, in words."""
    if annotation is None or annotation is type(None):
        return "null"
    if isinstance(annotation, type):
        return NAMES.get(annotation.__name__, annotation.__name__)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        return f"list of {_values(arguments[0])}"
    if origin is dict:
        return NAMES["dict"]
    if str(origin) == "typing.Literal":
        return ", ".join(map(str, arguments))
    if hasattr(annotation, "__metadata__"):
        return _values(arguments[0])
    return " or ".join(dict.fromkeys(_values(argument) for argument in arguments))


def _described(field: FieldInfo) -> tuple[str, str, str]:
    """A field's values, default and meaning."""
    return _values(field.annotation), _default(field), field.description or ""


def _default(field: FieldInfo) -> str:
    """The default as YAML has it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'
