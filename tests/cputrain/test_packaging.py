"""What a plain pip install brings."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text()


@pytest.mark.parametrize(("name", "untested"), [("torch", ("2.7.1", "2.14.0", "2.15.0")), ("torchvision", ("0.29.0",))])
def test_torch_is_bounded_to_what_is_tested(name: str, untested: tuple[str, ...]) -> None:
    found = re.search(rf'^    "({name}[<>=][^"]*)"', PROJECT, re.MULTILINE)
    assert found
    specifier = Requirement(found[1]).specifier
    assert specifier.contains(version(name).partition("+")[0])
    assert not any(specifier.contains(other) for other in untested)
