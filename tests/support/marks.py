"""Detect in a test's code whether it starts processes, so that test files need no marks."""

import multiprocessing
import subprocess
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.support.forked import Forked

STARTERS = (subprocess, multiprocessing, Forked)


def starts_processes(test: pytest.Function) -> bool:
    """Return whether the test, its fixtures or their helpers (functions under tests/) use one of STARTERS."""
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
    """Return the function inside a helper's decorators; None if it is not a function of the tests."""
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    if isinstance(value, FunctionType) and value.__module__.startswith("tests."):
        return value
    return None


def _names(code: CodeType) -> Iterator[str]:
    """Return the global names that a function's code uses, including functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
