"""Whether JSON is a plan, by plan.schema.json: the keywords of JSON Schema that it uses, and no others."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from operator import ge, gt, le
from pathlib import Path
from typing import Any

from affinity.errors import InputError

SCHEMA_FILE = "plan.schema.json"
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
LIMITS: dict[str, Callable[[Any, Any], bool]] = {"minimum": ge, "maximum": le, "exclusiveMinimum": gt}
MOST = 1 << 63
# Control characters, which a terminal may take for commands, and halves of characters, which nothing can encode but
# those that stand for the bytes of a file name.
UNSHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]")


def check_plan(data: Any) -> None:
    """Raise InputError with the first place of a host's plan that is not as the schema says."""
    problem = next(_problems(data, plan_schema(), ""), None)
    if problem is not None:
        raise InputError(f"the plan is damaged: {problem}: plan again")


@cache
def plan_schema() -> dict[str, Any]:
    """The schema: inside the package once installed, in docs/ in a checkout."""
    inside = Path(__file__).with_name(SCHEMA_FILE)
    path = inside if inside.is_file() else Path(__file__).parents[2] / "docs" / SCHEMA_FILE
    schema: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return schema


def _problems(value: Any, schema: dict[str, Any], place: str) -> Iterator[str]:
    """What is wrong with a value, and below it."""
    while "$ref" in schema:
        schema = plan_schema()["$defs"][schema["$ref"].rpartition("/")[2]] | {**schema, "$ref": None}
        schema = {key: part for key, part in schema.items() if part is not None}
    here = place or "it"
    types = schema.get("type", ())
    if types and not any(_is(value, name) for name in ([types] if isinstance(types, str) else types)):
        yield f"{here} is {_shown(value)}"
        return
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and not any(value == each and type(value) is type(each) for each in allowed):
        yield f"{here} is {_shown(value)}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if abs(value) >= MOST or not all(fits(value, schema[name]) for name, fits in LIMITS.items() if name in schema):
            yield f"{here} is {_shown(value)}"
    elif isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield f"{here} is empty"
        if UNSHOWN.search(value):
            yield f"{here} is {_shown(value)}, which has characters that cannot be shown"
    elif isinstance(value, list):
        yield from _problems_of_list(value, schema, place)
    elif isinstance(value, dict):
        yield from _problems_of_object(value, schema, place)


def _problems_of_list(value: list[Any], schema: dict[str, Any], place: str) -> Iterator[str]:
    if len(value) < schema.get("minItems", 0):
        yield f"{place} is empty"
    for number, item in enumerate(value):
        yield from _problems(item, schema.get("items", {}), f"{place}[{number}]")
    if schema.get("uniqueItems") and len({json.dumps(item) for item in value}) < len(value):
        yield f"{place} has a value twice"


def _problems_of_object(value: dict[str, Any], schema: dict[str, Any], place: str) -> Iterator[str]:
    prefix = place and f"{place}."
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    yield from (f"{prefix}{name} is missing" for name in schema.get("required", ()) if name not in value)
    for name, item in value.items():
        if UNSHOWN.search(name):
            yield f"{prefix}{_shown(name)} has characters that cannot be shown"
        elif not re.search(schema.get("propertyNames", {}).get("pattern", ""), name):
            yield f"{prefix}{_shown(name)} is not a name"
        elif name in properties:
            yield from _problems(item, properties[name], f"{prefix}{name}")
        elif others is False:
            yield f"{prefix}{name[:60]} is not a part of a plan"
        elif isinstance(others, dict):
            yield from _problems(item, others, f"{prefix}{name[:60]}")


def _is(value: Any, name: str) -> bool:
    """Whether a value is of a type of JSON Schema, in which true is no number."""
    return isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
