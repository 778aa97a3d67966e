"""What CONTRIBUTING.md says of the code, where no linter checks it."""

import ast
import importlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import cputrain

ROOT = Path(__file__).parents[2]
CODE = ("affinity", "mpi", "cputrain", "benchmarks", "tools", "tests", "compat")
MAX_LINES, MAX_FILE_LINES = 100, 900
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
MAY_USE_THE_ENVIRONMENT = {
    # Command lines, each read by its main(); below them it is an argument.
    "affinity/__main__.py",
    "affinity/bind.py",
    "affinity/start.py",
    "mpi/first_host.py",
    "mpi/preflight.py",
    "mpi/supervise/agent.py",
    "cputrain/comm/ccl/check.py",
    "cputrain/doctor.py",
    "cputrain/runs/trackers.py",
    # Called by torch, which hands nothing over, or by a user's own script.
    "cputrain/checkpoint/async_checkpoint.py",
    "cputrain/comm/ccl/__init__.py",
    "cputrain/data/loader.py",
    "cputrain/kernels/apply.py",
    "cputrain/kernels/operators.py",
    "cputrain/training/user_code.py",
    # Set what torch reads there.
    "cputrain/comm/group.py",
    "cputrain/launch/rank_process.py",
}  # and the files of the commands, cputrain/cli/*.py


@dataclass(slots=True, kw_only=True)
class Code:
    """What the tests look at in a file: a tree of each of them at the same time would take hundreds of MB."""

    path: str
    calls: int = 0
    lengths: dict[str, int] = field(default_factory=dict)  # lines of each function
    imports: list[ast.ImportFrom] = field(default_factory=list)
    uses_environment: bool = False
    uses: list[int] = field(default_factory=list)  # of the environment, in each function and import
    without_encoding: list[str] = field(default_factory=list)


@cache
def code_of(folder: str) -> tuple[Code, ...]:
    """Read each file of a folder at the top."""
    return tuple(read(path) for path in (ROOT / folder).rglob("*.py"))


def codes(folders: Iterable[str]) -> Iterator[Code]:
    for folder in folders:
        yield from code_of(folder)


def read(path: Path) -> Code:
    text = path.read_text(encoding="utf-8")
    code = Code(path=str(path.relative_to(ROOT)))
    names_environment = any(name in text for name in ENVIRONMENT)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            code.calls += 1
            if lacks_encoding(node):
                code.without_encoding.append(f"{code.path}:{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            code.lengths[f"{code.path}: {node.name}"] = node.end_lineno - node.lineno + 1
        elif isinstance(node, ast.ImportFrom):
            code.imports.append(node)
        if names_environment and isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom):
            code.uses.append(uses_of_the_environment(node))
        elif names_environment and isinstance(node, ast.Module):
            code.uses_environment = uses_of_the_environment(node) > 0
    return code


def test_no_function_has_more_than_100_lines() -> None:
    """Without decorators: those of a command are its options."""
    lengths = {name: lines for code in codes(CODE) for name, lines in code.lengths.items()}
    assert len(lengths) > 1000
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_file_of_the_packages_has_more_than_900_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for folder in ("affinity", "mpi", "cputrain")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".hpp", ".js", ".css", ".j2") and "vendor" not in path.parts
    }
    assert len(lengths) > 100
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count, too."""
    graph = grimp.build_graph("cputrain")
    assert len(graph.modules) > 100
    TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}).prepare()


def test_packages_give_their_public_names_and_no_others() -> None:
    """Scripts may import `cputrain.data.ImageLoader`; all else is imported from the module that defines it."""
    names = {"data": "ImageLoader", "training": "TrainResult", "kernels": "optimize", "checkpoint": "Restored"}
    for package, name in names.items():
        module = importlib.import_module(f"cputrain.{package}")
        assert getattr(module, name) is getattr(cputrain, name)
        with pytest.raises(AttributeError, match=f"module 'cputrain.{package}' has no attribute 'Lars'"):
            module.Lars  # noqa: B018


def uses_of_the_environment(node: ast.AST) -> int:
    """How often os.environ and its like are named in a piece of code."""
    return sum(
        (isinstance(one, ast.Attribute) and one.attr in ENVIRONMENT)
        or (isinstance(one, ast.ImportFrom) and any(alias.name in ENVIRONMENT for alias in one.names))
        for one in ast.walk(node)
    )


def test_only_command_lines_and_what_others_call_use_the_environment() -> None:
    uses = {code.path: code.uses for code in codes(("affinity", "mpi", "cputrain")) if code.uses_environment}
    assert {path for path in uses if Path(path).parent != Path("cputrain/cli")} == MAY_USE_THE_ENVIRONMENT
    assert [path for path, functions in uses.items() if max(functions) > 1] == []  # read once, and handed on


@pytest.mark.parametrize(
    "code", ["os.environ['A']", "os.getenv('A')", "from os import environ", "import os as o\no.environ.get('A')"]
)
def test_a_use_of_the_environment_is_seen(code: str) -> None:
    assert uses_of_the_environment(ast.parse(code)) == 1


OPENING = {"read_text", "write_text", "open", "fdopen", "NamedTemporaryFile", "TemporaryFile"}


def lacks_encoding(call: ast.Call) -> bool:
    """Whether a call reads or writes text in the locale's encoding; ruff sees that only where it knows the type."""
    keywords = {keyword.arg for keyword in call.keywords}
    if keywords & {"encoding", None}:
        return False
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if not (name in OPENING or keywords & {"text", "universal_newlines"}):
        return False
    function = ast.unparse(call.func)
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    modes = [text for text in texts if re.fullmatch(r"[rwax][bt]?\+?[bt]?", text)]
    if any(each.arg in ("text", "universal_newlines") and ast.unparse(each.value) == "True" for each in call.keywords):
        return True
    if name in ("read_text", "write_text"):
        return len(call.args) < (1 if name == "read_text" else 2)
    if name == "open" and function not in ("os.open", "tarfile.open", "gzip.open"):
        return not values or any("b" not in mode for mode in modes)
    return name in ("fdopen", "NamedTemporaryFile", "TemporaryFile") and any("b" not in mode for mode in modes)


def test_text_is_read_and_written_in_an_encoding_that_is_named() -> None:
    found = [*codes(("affinity", "mpi", "cputrain", "benchmarks", "tools", "docs"))]
    assert sum(code.calls for code in found) > 10_000
    assert [call for code in found for call in code.without_encoding] == []
    for text in ("p.read_text()", "p.write_text(x)", "p.open('w')", "open(p, 'a')", "run(a, text=True)", "p.open()"):
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call) and lacks_encoding(call), text
