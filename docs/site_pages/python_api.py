"""Page of the public Python functions and classes, from their signatures and docstrings."""

import ast
import inspect
from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import cputrain
from site_pages.text import plain

INTRODUCTION = """# Python API

The functions and classes that a script may import. Four guides use them: [your own network](../guides/own-code.md),
[parts for your own loop](../guides/parts.md), [images for your own loop](../guides/image-loader.md) and
[oneCCL in any program](../guides/oneccl.md).
Everything else is internal and may change.
"""
SECTIONS: dict[str, tuple[str, ...]] = {
    "Training": ("train", "TrainResult", "Accuracy"),
    "Kernels": ("optimize", "explain", "restore", "KernelPlan", "kernels.enable", "kernels.disable"),
    "Images": ("ImageLoader", "ImageLoader.open", "ImageLoader.set_epoch", "Transform", "Augmentation"),
    "Optimizers and schedules": ("Lars", "Lamb", "AdagradDA", "param_groups", "Schedule", "lr_at"),
    "Checkpoints": (
        "AsyncCheckpoint",
        "AsyncCheckpoint.save",
        "AsyncCheckpoint.restore",
        "AsyncCheckpoint.close",
        "Restored",
    ),
    "Plans": (
        "find_machine",
        "Request",
        "plan_machine",
        "compare_plan",
        "Plan",
        "WorkerPlan",
        "Picture",
        "plan_to_json",
        "read_plan",
        "bind_process",
    ),
    "Communication": ("comm.ccl", "compress_bf16", "reduce_float32"),
    "Errors": ("InputError", "RunError"),
}
"""Names in `cputrain`, by topic."""


def python_api() -> str:
    """Return a section for each topic, with import, signature and docstring of each name."""
    parts = [INTRODUCTION]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += map(_entry, names)
    return "\n".join(parts)


def _entry(name: str) -> str:
    described: Any = cputrain
    for attribute in name.split("."):
        described = getattr(described, attribute)
    first, _, rest = (inspect.getdoc(described) or "").partition("\n\n")
    if not first:
        raise AssertionError(f"{name} has no docstring")
    code = f"import cputrain.{name}" if inspect.ismodule(described) else f"from cputrain import {name.split('.')[0]}"
    signature = "" if inspect.ismodule(described) else _signature(described, name)
    manual = "\n".join(filter(None, (rest, *_field_manuals(described))))
    details = f"```text\n{manual}\n```\n" if manual else ""
    return f"### {name}\n\n```python\n{code}\n{signature}```\n\n{plain(first)}\n\n{details}"


def _field_manuals(described: Any) -> list[str]:
    """Return "name: manual" of a data class's fields that have a docstring below them."""
    if not is_dataclass(described):
        return []
    body = ast.parse(inspect.getsource(described)).body[0].body  # type: ignore[attr-defined]
    return [
        f"{field.target.id}: {' '.join(text.value.value.split())}"
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    ]


def _signature(described: Any, name: str) -> str:
    """Return names, types and defaults of the arguments as in the source; a data class has its fields."""
    kind = ast.ClassDef if inspect.isclass(described) else ast.FunctionDef
    tree = ast.parse(Path(inspect.getsourcefile(described) or "").read_text(encoding="utf-8"))
    last = name.rpartition(".")[2]
    node = [each for each in ast.walk(tree) if isinstance(each, kind) and each.name == last][-1]  # after overloads
    if isinstance(node, ast.FunctionDef):
        return _call(name, node.args, node.returns)
    init = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if init is not None:
        return _call(name, init.args, None)
    fields = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
    return _lines(name, fields) if fields else ""


def _call(name: str, arguments: ast.arguments, returns: ast.expr | None) -> str:
    words = [ast.unparse(each) for each in arguments.args]
    for i, default in enumerate(arguments.defaults, len(words) - len(arguments.defaults)):
        words[i] += f" = {ast.unparse(default)}"
    words += ["*"] if arguments.kwonlyargs else []
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        words.append(ast.unparse(argument) + (f" = {ast.unparse(value)}" if value is not None else ""))
    if arguments.kwarg is not None:
        words.append(f"**{ast.unparse(arguments.kwarg)}")
    words = [word for word in words if word not in ("self", "cls")]
    return _lines(name, words, f" -> {ast.unparse(returns)}" if returns is not None else "")


def _lines(name: str, words: list[str], result: str = "") -> str:
    return "".join([f"\n{name}(\n", *(f"    {word},\n" for word in words), f"){result}\n"])
