"""Lazy import of a package's public names.

`from cputrain.data import ImageLoader` loads only the module that defines it, so that the command line starts without
torch. The public names are listed in the package's `__init__.pyi`, which type checkers read, too.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def front(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package, whose `__init__.py` is `file`; they provide `__all__`, too."""
    modules: dict[str, str] = {}

    def names() -> dict[str, str]:
        """Public name -> module that defines it."""
        if not modules:
            stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
            lines = (node for node in stub.body if isinstance(node, ast.ImportFrom))
            modules.update((alias.name, f"{package}.{node.module}") for node in lines for alias in node.names)
        return modules

    def load(name: str) -> Any:
        if name == "__all__":
            return sorted(names())
        if name.startswith("__") or name not in names():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(names()[name]), name)

    return load, lambda: sorted(names())
