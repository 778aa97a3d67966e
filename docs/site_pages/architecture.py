"""Page of the packages and modules, from their docstrings."""

import ast
from pathlib import Path

from site_pages.imports import ROOT, TOP
from site_pages.text import code, plain, table

INTRODUCTION = """# Packages and modules

The docstring of each package and the first sentence of each module, from the outside in: `cputrain` may import `mpi`,
and both may import `affinity`.
"""


def modules() -> str:
    """Return a section for each package, with a table of its modules."""
    parts = [INTRODUCTION]
    for top in TOP:
        for init in sorted((ROOT / top).rglob("__init__.py")):
            folder = init.parent
            rows = [[code(path.name), plain(_first_line(path))] for path in sorted(folder.glob("[!_]*.py"))]
            modules_table = f"\n{table(['module', 'contents'], rows)}\n" if rows else ""
            name = ".".join(folder.relative_to(ROOT).parts)
            title = name if top == "cputrain" else f"cputrain.{name}"
            parts.append(f"{'#' * min(2 + name.count('.'), 4)} {title}\n\n{plain(_docstring(init))}\n{modules_table}")
    return "\n".join(parts)


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _first_line(path: Path) -> str:
    return _docstring(path).split("\n\n")[0]
