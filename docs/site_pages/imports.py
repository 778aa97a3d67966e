"""Imports between packages, read from the source: a package is a folder of `affinity`, `mpi` or `cputrain`."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOP = ("cputrain", "mpi", "affinity")  # each may import the ones to its right


def packages() -> dict[str, Path]:
    """Return the folders of the three top packages and of the packages directly inside them, by dotted name."""
    found = {name: ROOT / name for name in TOP}
    for name in TOP:
        inner = sorted(path.parent for path in (ROOT / name).glob("*/__init__.py") if not path.parent.is_symlink())
        found |= {f"{name}.{folder.name}": folder for folder in inner}
    return found


def import_graph() -> dict[str, set[str]]:
    """Return the other packages that each package's files import."""
    known = packages()
    graph: dict[str, set[str]] = {name: set() for name in known}
    for top in TOP:
        for path in (ROOT / top).rglob("*.py"):
            importer = _package_of(".".join(path.relative_to(ROOT).with_suffix("").parts), known)
            for module in _imported(path):
                graph[importer].add(_package_of(module, known))
    return {name: imported - {name} for name, imported in graph.items()}


def _package_of(module: str, known: dict[str, Path]) -> str:
    """Return the deepest known package of a dotted module name."""
    inner = ".".join(module.split(".")[:2])
    return inner if inner in known else module.split(".")[0]


def _imported(path: Path) -> Iterator[str]:
    """Yield the project's modules that a file imports, including imports inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cputrain":
            yield from (_folder_of(f"{node.module}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (_folder_of(name.name) for name in node.names if name.name.split(".")[0] == "cputrain")


def _folder_of(module: str) -> str:
    """Map `cputrain.mpi` and `cputrain.affinity` to their folders at the top."""
    inner = module.removeprefix("cputrain.")
    return inner if inner.split(".")[0] in TOP else module
