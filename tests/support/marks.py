"""Whether a test starts processes, found in its code: so that no file of tests has to say it."""

import multiprocessing
import subprocess
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

STARTERS = (subprocess, multiprocessing)


def starts_processes(test: pytest.Function) -> bool:
    """Whether the test, a fixture of it or a helper of either (a function under tests/) uses subprocess."""
    fixtures = test._fixtureinfo.name2fixturedefs.values()
    found = [test.function, *(definition.func for definitions in fixtures for definition in definitions)]
    seen: set[int] = set()
    while found:
        function = _plain(found.pop())
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        used = [function.__globals__.get(name) for name in _names(function.__code__)]
        if any(value is starter for value in used for starter in STARTERS):
            return True
        found += used
    return False


def _plain(value: Any) -> FunctionType | None:
    """The function behind a helper's decorators; None for what is not a function of the tests."""
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    if isinstance(value, FunctionType) and value.__module__.startswith("tests."):
        return value
    return None


def _names(code: CodeType) -> Iterator[str]:
    """The global names that a function's code uses, those of functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
