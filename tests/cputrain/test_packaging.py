"""What a plain pip install brings."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from cputrain import __version__

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(("name", "untested"), [("torch", ("2.7.1", "2.14.0", "2.15.0")), ("torchvision", ("0.29.0",))])
def test_torch_is_bounded_to_what_is_tested(name: str, untested: tuple[str, ...]) -> None:
    found = re.search(rf'^    "({name}[<>=][^"]*)"', PROJECT, re.MULTILINE)
    assert found
    specifier = Requirement(found[1]).specifier
    assert specifier.contains(version(name).partition("+")[0])
    assert not any(specifier.contains(other) for other in untested)


def test_the_packages_are_typed_for_those_who_import_them() -> None:
    assert all((ROOT / "cputrain" / package / "py.typed").is_file() for package in ("affinity", "mpi", "."))


def test_the_source_distribution_has_what_the_tests_read() -> None:
    section = PROJECT.partition("[tool.hatch.build.targets.sdist]\n")[2]
    section = section.partition("include = [")[2].partition("\n]")[0]
    names = set(re.findall(r'"([^"]+)"', section))
    assert {"affinity", "mpi", "cputrain", "configs", "docs", "tests", "benchmarks", "CONTRIBUTING.md"} <= names
    assert all((ROOT / name).exists() for name in names - {"man"})  # made when a distribution is built


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"
