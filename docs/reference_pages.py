"""The reference pages, written from the code: recipe keys from the schema, plan.json from its JSON Schema, modules from
their docstrings. The command line is drawn from click by sphinx-click."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from cputrain.cli import COMMANDS
from cputrain.schema import Recipe
from cputrain.schema.base import Section

ROOT = Path(__file__).parent.parent
PACKAGES = ("affinity", "mpi", "cputrain")


def write_reference(folder: Path) -> None:
    """Write every generated page into the folder; one whose text is unchanged keeps its time."""
    pages = {
        "command-line.md": command_line(),
        "recipe-keys.md": recipe_keys(),
        "plan-json.md": plan_json(json.loads((ROOT / "docs/plan.schema.json").read_text())),
        "modules.md": modules(),
    }
    for name, text in pages.items():
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def command_line() -> str:
    """Every command with its options, in the order that --help has."""
    blocks = "\n".join(
        f"```{{eval-rst}}\n.. click:: cputrain.cli.{name}:command\n   :prog: cputrain {name}\n   :nested: full\n```\n"
        for name in COMMANDS
    )
    return f"# Command line\n\nExit status: see [exit status](exit-status.md).\n\n{blocks}"


def recipe_keys() -> str:
    """A table for each section of a recipe: key, values, default, meaning."""
    parts = ["# Recipe keys\n\nAny of them is set on the command line too: `cputrain train RECIPE batch.local=16`.\n"]
    for path, section in sections("", Recipe):
        rows = [
            f"| `{path}{name}` | {_cell(_values(field.annotation))} | {_cell(_default(field))} | "
            f"{_cell(' '.join((field.description or '').split()))} |"
            for name, field in section.model_fields.items()
            if _section_of(field.annotation) is None
        ]
        title = path.removesuffix(".") or "top level"
        doc = " ".join((section.__doc__ or "").split())
        parts.append(f"## {title}\n\n{doc}\n\n| key | values | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


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
        return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}.get(
            annotation.__name__, annotation.__name__
        )
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        return f"list of {_values(arguments[0])}"
    if origin is dict:
        return "mapping"
    if str(origin) == "typing.Literal":
        return ", ".join(map(str, arguments))
    if hasattr(annotation, "__metadata__"):
        return _values(arguments[0])
    return " or ".join(dict.fromkeys(_values(argument) for argument in arguments))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value) or '""'


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def plan_json(schema: dict[str, Any]) -> str:
    """The fields of plan.json, one row each, nested ones with their path."""
    rows = "\n".join(f"| `{path}` | {kind} | {_cell(text)} |" for path, kind, text in _fields("", schema, schema))
    return (
        "# plan.json\n\nWhat `cputrain plan --format json` prints and a run's folder holds. "
        "[plan.schema.json](../plan.schema.json) is its JSON Schema.\n\n"
        f"| field | type | meaning |\n|---|---|---|\n{rows}\n"
    )


def _fields(path: str, schema: dict[str, Any], root: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    for name, field in schema.get("properties", {}).items():
        whole = root["$defs"][field["$ref"].rpartition("/")[2]] if "$ref" in field else field
        kind = whole.get("type", "any")
        yield f"{path}{name}", " or ".join(kind) if isinstance(kind, list) else kind, field.get("description", "")
        yield from _fields(f"{path}{name}.", whole, root)
        if "items" in whole:
            yield from _fields(f"{path}{name}[].", whole["items"], root)


def modules() -> str:
    """Every module with the first sentence of its docstring, by package."""
    parts = ["# Modules\n\nThe first line of each file, from the outside in: `cputrain` may import `mpi`, both `affinity`.\n"]
    for package in PACKAGES:
        for folder in [ROOT / package, *sorted(path for path in (ROOT / package).rglob("*") if path.is_dir())]:
            if not (folder / "__init__.py").is_file():
                continue
            name = ".".join(folder.relative_to(ROOT).parts)
            rows = [f"| `{path.name}` | {_cell(_first_line(path))} |" for path in sorted(folder.glob("[!_]*.py"))]
            about = _docstring(folder / "__init__.py")
            table = "\n\n| file | holds |\n|---|---|\n" + "\n".join(rows) if rows else ""
            parts.append(f"## {name}\n\n{about}{table}")
    return "\n\n".join(parts) + "\n"


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def _first_line(path: Path) -> str:
    return " ".join(_docstring(path).split("\n\n")[0].split())
