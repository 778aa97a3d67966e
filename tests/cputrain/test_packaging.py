"""What a plain pip install brings."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
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


def made_here(folder: str, names: list[str]) -> set[str]:
    """Return what a checkout's folder has that is not in the repository."""
    here = {"__pycache__", "_build"}
    if Path(folder) == ROOT:
        hidden = {name for name in names if name.startswith(".") and name not in (".ci", ".gitignore")}
        here |= {"build", "data", "dist", "man", "runs"} | hidden
    return here & {*names}


@pytest.mark.long
def test_a_wheel_is_the_same_from_a_checkout_and_from_a_source_distribution(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=made_here)
    (checkout / "man").mkdir()
    (checkout / "man/cputrain.1").write_text(".TH CPUTRAIN 1\n")
    build = (sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path), "-t")
    subprocess.run((*build, "sdist"), cwd=checkout, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path)
    found = []
    for place in (checkout, tmp_path / f"cputrain-{__version__}"):
        subprocess.run((*build, "wheel"), cwd=place, check=True, capture_output=True)
        wheel = next(tmp_path.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            found.append({name for name in archive.namelist() if "/RECORD" not in name})
        wheel.unlink()
    assert found[0] == found[1]
    assert {name.partition("/")[0] for name in found[0]} == {
        *("cputrain", "_cputrain_autoload.py", "_cputrain_command.py"),
        f"cputrain-{__version__}.dist-info",
        f"cputrain-{__version__}.data",
    }
    assert f"cputrain-{__version__}.data/data/share/man/man1/cputrain.1" in found[0]
    for name in (
        "affinity/bind.py",
        "affinity/py.typed",
        "mpi/supervise/agent.py",
        "runs/folder.py",
        "machines/clx-8280.yaml",
    ):
        assert f"cputrain/{name}" in found[0]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"
