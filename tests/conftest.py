"""Golden files, the profile of property tests, marks of tests that start processes, and skips that count as failures
where everything must run."""

import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import hypothesis
import pytest

from tests.support.forked import Forked, share

hypothesis.settings.register_profile("shared", deadline=None)  # a shared machine pauses now and then
hypothesis.settings.load_profile("shared")
STARTERS = (subprocess, multiprocessing, Forked)
GOLDEN = Path(__file__).parent / "golden"
# pytest keeps the tests as it has rewritten them; without that, each process of tests rewrites all of them for 10 s.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # for the commands of tests, and the workers of pytest-xdist
# Tests run side by side on all cores, where OpenMP threads that spin as they wait take three times the CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
gc.disable()  # until all tests are collected: of what that makes, nothing is garbage
collect_ignore = [] if os.environ.get("TENSORFLOW_PYTHON") else ["cputrain/test_tensorflow.py"]  # see there


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start processes, which `make test-fast` leaves out."""
    for item in items:
        if isinstance(item, pytest.Function) and starts_processes(item):
            item.add_marker("processes")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, before it starts the processes of tests
def pytest_xdist_setupnodes() -> None:
    share()


def pytest_collection_finish() -> None:
    """Keep all that is imported out of the garbage collector's passes, which take a twentieth of the CPU time."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    """One thread for torch in a test's own process: tests run side by side, and OpenMP threads spin as they wait."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files from what is computed now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with tests/golden/NAME; a missing file fails."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        assert path.is_file(), f"no golden file {path}: run pytest --update-golden and read what it wrote"
        assert text + "\n" == path.read_text()

    return compare


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where everything must run, a skip is a failure; a command that failed is shown with what it output."""
    report = yield
    if call.excinfo and isinstance(failed := call.excinfo.value, subprocess.CalledProcessError):
        report.sections.append(("stderr of the command", str(failed.stderr)))
    if report.skipped and os.environ.get("CPUTRAIN_REQUIRE_REAL") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped though CPUTRAIN_REQUIRE_REAL=1: {report.longrepr}"
    return report


def starts_processes(test: pytest.Function) -> bool:
    """Return whether the test, its fixtures or their helpers (functions under tests/) use one of STARTERS."""
    fixtures = test._fixtureinfo.name2fixturedefs.values()
    functions = [test.function, *(definition.func for definitions in fixtures for definition in definitions)]
    return any(_reaches_starter(found) for function in functions if (found := _plain(function)))


@cache
def _reaches_starter(function: FunctionType) -> bool:
    """Return whether a function, or one that it uses, uses one of STARTERS."""
    found, seen = [function], {function}
    while found:
        uses_starter, used = _used(found.pop())
        if uses_starter:
            return True
        found += used - seen
        seen |= used
    return False


@cache
def _used(function: FunctionType) -> tuple[bool, frozenset[FunctionType]]:
    """Return whether a function names one of STARTERS, and the functions of the tests that it names."""
    used = [function.__globals__.get(name) for name in {*_names(function.__code__)}]
    uses_starter = any(value is starter for value in used for starter in STARTERS)
    return uses_starter, frozenset(found for value in used if (found := _plain(value)))


def _plain(value: Any) -> FunctionType | None:
    """Return the function inside a helper's decorators; None if it is not a function of the tests."""
    while inner := getattr(value, "__dict__", {}).get("__wrapped__"):
        value = inner
    if isinstance(value, FunctionType) and value.__module__.startswith("tests."):
        return value
    return None


def _names(code: CodeType) -> Iterator[str]:
    """Return the global names that a function's code uses, including functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
