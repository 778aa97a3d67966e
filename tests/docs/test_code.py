"""What CONTRIBUTING.md says of the code, where no linter checks it."""

import ast
import importlib
import re
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

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
    "cputrain/comm/ccl/__init__.py",
    "cputrain/data/loader.py",
    "cputrain/training/entry.py",
    # Set what torch reads there.
    "cputrain/comm/group.py",
    "cputrain/launch/rank_process.py",
}  # and the files of the commands, cputrain/cli/*.py


def test_no_function_has_more_than_100_lines() -> None:
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


def fronts() -> dict[str, set[str]]:
    """Package -> its public names, of the packages that have them in a stub."""
    names = {}
    for top in ("affinity", "mpi", "cputrain"):
        for stub in (ROOT / top).rglob("__init__.pyi"):
            package = ".".join(stub.parent.relative_to(ROOT).parts)
            lines = (node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom))
            found = {alias.name for node in lines for alias in node.names}
            names[package if top == "cputrain" else f"cputrain.{package}"] = found
    return names


def test_the_public_names_of_every_package_can_be_imported() -> None:
    assert len(fronts()) > 15
    for package, names in fronts().items():
        module = importlib.import_module(package)
        assert set(module.__all__) == names == set(dir(module))
        assert [name for name in names if not hasattr(module, name)] == []
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nonesuch'"):
            module.nonesuch  # noqa: B018


def test_tests_import_what_a_package_offers_in_front() -> None:
    offered = fronts()
    past = {
        f"{path.relative_to(ROOT)}: from {node.module} import {alias.name}"
        for folder in ("tests", "benchmarks", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if "guest" not in path.parts  # in the emulated machines every import costs a second
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module not in offered
        for alias in node.names
        if alias.name in offered.get(node.module.rpartition(".")[0], set())
    }
    assert past == set()


def uses_of_the_environment(node: ast.AST) -> int:
    """How often os.environ and its like are named in a piece of code."""
    return sum(
        (isinstance(one, ast.Attribute) and one.attr in ENVIRONMENT)
        or (isinstance(one, ast.ImportFrom) and any(alias.name in ENVIRONMENT for alias in one.names))
        for one in ast.walk(node)
    )


def test_only_command_lines_and_what_others_call_use_the_environment() -> None:
    uses = {
        str(path.relative_to(ROOT)): [
            uses_of_the_environment(part)
            for part in ast.walk(tree)
            if isinstance(part, ast.FunctionDef | ast.Import | ast.ImportFrom)
        ]
        for folder in ("affinity", "mpi", "cputrain")
        for path in (ROOT / folder).rglob("*.py")
        if uses_of_the_environment(tree := ast.parse(path.read_text()))
    }
    assert {path for path in uses if Path(path).parent != Path("cputrain/cli")} == MAY_USE_THE_ENVIRONMENT
    assert [path for path, functions in uses.items() if max(functions) > 1] == []  # read once, and handed on


@pytest.mark.parametrize(
    "code", ["os.environ['A']", "os.getenv('A')", "from os import environ", "import os as o\no.environ.get('A')"]
)
def test_a_use_of_the_environment_is_seen(code: str) -> None:
    assert uses_of_the_environment(ast.parse(code)) == 1


def lacks_encoding(call: ast.Call) -> bool:
    """Whether a call reads or writes text in the locale's encoding; ruff sees that only where it knows the type."""
    if any(keyword.arg in ("encoding", None) for keyword in call.keywords):
        return False
    function = ast.unparse(call.func)
    name = function.rpartition(".")[2]
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
    calls = {
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}": lacks_encoding(node)
        for folder in ("affinity", "mpi", "cputrain", "benchmarks", "tools", "docs")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    }
    assert len(calls) > 10_000
    assert [call for call, lacks in calls.items() if lacks] == []
    for code in ("p.read_text()", "p.write_text(x)", "p.open('w')", "open(p, 'a')", "run(a, text=True)", "p.open()"):
        call = ast.parse(code, mode="eval").body
        assert isinstance(call, ast.Call) and lacks_encoding(call), code
