"""What CONTRIBUTING.md says of the code, where no linter checks it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("affinity", "mpi", "cputrain", "benchmarks", "tools", "tests", "compat")
MAX_LINES = 62
FILE = re.compile(r"(?<![\w/.*])[\w/]+(?:/(?![\w*])|\.(?:py|md))")  # or a folder, with a slash at its end


def test_no_function_has_more_than_62_lines() -> None:
    """Without decorators: those of a command are its options."""
    lengths = {
        f"{path.relative_to(ROOT)}: {node.name}": node.end_lineno - node.lineno + 1
        for folder in CODE
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    }
    assert len(lengths) > 1000
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_the_files_that_a_packages_docstring_names_exist() -> None:
    named = {
        (path.parent, file)
        for folder in CODE
        for path in (ROOT / folder).rglob("__init__.py")
        for file in FILE.findall(ast.get_docstring(ast.parse(path.read_text())) or "")
    }
    assert len(named) > 50
    missing = [(str(here.relative_to(ROOT)), file) for here, file in named if not (here / file).exists()]
    assert [(here, file) for here, file in missing if not (ROOT / file).exists()] == []


def test_no_name_of_a_class_stands_twice() -> None:
    places: dict[str, list[str]] = {}
    for folder in ("affinity", "mpi", "cputrain"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(places) > 200
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
