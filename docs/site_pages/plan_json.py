"""JSON Schema of plan.json, from the types that read it, and the page of its fields.

A type's docstring describes each field as `name: description`, with further lines indented.
"""

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import NextBest, WorkerPlan
from cputrain.affinity.planner.plan_file import WrittenMachine, WrittenPlan
from cputrain.affinity.planner.request import OPTION_OF, Measured, Rate, Reason, Request, Tuned, Unused
from cputrain.affinity.planner.workload import Workload
from cputrain.affinity.topology.machine import Core, Machine, NumaNode
from site_pages.imports import ROOT
from site_pages.text import code, plain, table

INTRODUCTION = """# plan.json

A run's folder contains this file, and `cputrain plan --format json` prints it.
[plan.schema.json](../plan.schema.json) is its JSON Schema. `[]` marks the elements of a list.
"""
FIELD = re.compile(r"^(\w+): (.+(?:\n {4}.+)*)", re.MULTILINE)
TYPES: tuple[tuple[type, ...], ...] = (
    *(
        (kind,)
        for kind in (
            WrittenPlan,
            Request,
            Workload,
            Runtime,
            Measured,
            Rate,
            Tuned,
            WorkerPlan,
            Unused,
            Reason,
            NextBest,
        )
    ),
    *((Core,), (NumaNode,), (Machine, WrittenMachine)),
)


def plan_schema() -> dict[str, Any]:
    """Return the schema: the described fields of each type, and no others."""
    schema = msgspec.json.schema(WrittenPlan)
    for kinds in TYPES:
        texts = dict(pair for kind in kinds for pair in FIELD.findall(inspect.getdoc(kind) or ""))
        written = schema["$defs"][kinds[-1].__name__]
        written["additionalProperties"] = False
        written["description"] = (inspect.getdoc(kinds[-1]) or "").split("\n\n")[0].replace("\n", " ")
        for name, field in written["properties"].items():
            field.pop("default", None)
            if name in texts:
                field["description"] = _sentence(texts[name])
            if kinds == (Request,) and name in OPTION_OF and OPTION_OF[name].choices and field["type"] == "string":
                field["enum"] = [*OPTION_OF[name].choices]
    title = "A host's plan: what `cputrain plan --format json` prints and plan.json holds"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **schema}


def _sentence(text: str) -> str:
    """Return a field's description with JSON's null for None."""
    words = " ".join(text.split()).replace("None", "null")
    return f"{words[0].upper()}{words[1:]}"


def plan_json() -> str:
    """Return a table with the path, type and meaning of each field."""
    schema = json.loads((ROOT / "docs/plan.schema.json").read_text(encoding="utf-8"))
    return f"{INTRODUCTION}\n{table(['field', 'type', 'meaning'], _fields('', schema, schema))}\n"


def _fields(path: str, schema: dict[str, Any], root: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    schema = _resolved(schema, root)
    for name, field in schema.get("properties", {}).items():
        whole = _resolved(field, root)
        yield code(f"{path}{name}"), _type(field, root), plain(field.get("description", whole.get("description", "")))
        yield from _fields(f"{path}{name}.", whole, root)
        if "items" in whole:
            yield from _fields(f"{path}{name}[].", whole["items"], root)


def _resolved(field: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field's values other than null."""
    if "anyOf" in field:
        field = next(part for part in field["anyOf"] if part.get("type") != "null")
    return root["$defs"][field["$ref"].rpartition("/")[2]] if "$ref" in field else field


def _type(field: dict[str, Any], root: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type(part, root) for part in field["anyOf"])
    whole = _resolved(field, root)
    return ", ".join(map(str, whole["enum"])) if "enum" in whole else str(whole["type"])
