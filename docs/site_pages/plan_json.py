"""The fields of plan.json, from its JSON Schema."""

import json
from collections.abc import Iterator
from typing import Any

from site_pages.imports import ROOT
from site_pages.text import code, plain, table

INTRODUCTION = """# plan.json

A run's folder contains this file, and `cputrain plan --format json` prints it.
[plan.schema.json](../plan.schema.json) is its JSON Schema. `[]` marks the elements of a list.
"""


def plan_json() -> str:
    """One row for each field, with its path, type and meaning."""
    schema = json.loads((ROOT / "docs/plan.schema.json").read_text(encoding="utf-8"))
    return f"{INTRODUCTION}\n{table(['field', 'type', 'meaning'], _fields('', schema, schema))}\n"


def _fields(path: str, schema: dict[str, Any], root: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    schema = _resolved(schema, root)
    for name, field in schema.get("properties", {}).items():
        whole = _resolved(field, root)
        yield code(f"{path}{name}"), _type(whole), plain(field.get("description", whole.get("description", "")))
        yield from _fields(f"{path}{name}.", whole, root)
        if "items" in whole:
            yield from _fields(f"{path}{name}[].", whole["items"], root)


def _resolved(field: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    return root["$defs"][field["$ref"].rpartition("/")[2]] if "$ref" in field else field


def _type(field: dict[str, Any]) -> str:
    if "const" in field:
        return str(field["const"])
    if "enum" in field:
        return ", ".join("null" if value is None else str(value) for value in field["enum"])
    kind = field.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else kind
