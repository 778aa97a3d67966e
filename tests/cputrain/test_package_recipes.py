"""packaging/: container recipes and packages read as their programs read them; they agree with pyproject.toml."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cputrain import __version__
from tests.support.commands import need

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = {requirement.name: requirement for requirement in map(Requirement, PROJECT["dependencies"])}
INSTRUCTIONS = {"FROM", "RUN", "ARG", "COPY", "CMD", "ENV", "LABEL", "WORKDIR"}
SECTIONS = {"files", "post", "environment", "runscript", "test", "labels", "help"}
EASYCONFIG = FOLDER / f"easybuild/cputrain-{__version__}-foss-2024a.eb"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, continued lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def sections() -> dict[str, str]:
    """The sections of Apptainer's definition; "" is its head."""
    parts = re.split(r"^%(\w+)\n", (FOLDER / "cputrain.def").read_text(), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def check_shell(script: str) -> None:
    """Let shellcheck read a script of sh."""
    result = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), "--shell=sh", "-"], input=script, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


def test_the_dockerfile_has_known_instructions_and_sound_shell_lines() -> None:
    found = instructions()
    assert {word for word, _ in found} <= INSTRUCTIONS and found[0][0] == "FROM"
    arguments = "".join(f"{rest}\n" for word, rest in found if word == "ARG")
    for word, rest in found:
        if word == "RUN":
            check_shell(f"# shellcheck disable=SC2086,SC2034\n{arguments}{rest}\n")
    assert dict(found)["CMD"] == '["cputrain", "--help"]'


def test_the_apptainer_definition_has_known_sections_and_sound_shell_lines() -> None:
    found = sections()
    assert set(found) - {""} <= SECTIONS
    assert re.search(r"^Bootstrap: docker\nFrom: \S+$", found[""], re.MULTILINE)
    for name in ("post", "environment", "runscript", "test"):
        check_shell(found[name])


def test_the_test_of_the_apptainer_image_passes_with_this_python() -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    need("bash", "sh")
    result = subprocess.run(
        ["sh", "-ec", sections()["test"]], env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith(__version__)


@pytest.mark.parametrize("name", ["Dockerfile", "cputrain.def"])
def test_the_images_install_what_the_project_allows(name: str) -> None:
    text = (FOLDER / name).read_text()
    extras = [Requirement(each) for group in ("ccl", "turbo") for each in PROJECT["optional-dependencies"][group]]
    for pinned in re.findall(r"\b(torch|torchvision)==([0-9.]+)", text):
        assert NEEDED[pinned[0]].specifier.contains(pinned[1])
    written = {Requirement(each).name: Requirement(each) for each in re.findall(r'"([\w-]+[<>=][^" ]+)"', text)}
    assert {each.name: each.specifier for each in extras} == {
        name: requirement.specifier for name, requirement in written.items() if name in {e.name for e in extras}
    }


def test_spack_s_package_has_the_project_s_dependencies() -> None:
    tree = ast.parse((FOLDER / "spack/package.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    versions = [call.args[0].value for call in calls if call.func.id == "version"]
    assert versions == [__version__]
    specs = {
        spec.split()[0].split("@")[0]: spec
        for call in calls
        if call.func.id == "depends_on"
        for spec in [call.args[0].value]
    }
    for name, requirement in NEEDED.items():
        spec = specs[f"py-{name}"]
        least = next(part.version for part in requirement.specifier if part.operator == ">=")
        assert f"@{least}:" in spec, spec
        assert any(part.operator == "<" for part in requirement.specifier) == bool(re.search(r"@[\d.]+:\d", spec)), spec


def test_the_easyconfig_has_the_project_s_dependencies() -> None:
    values: dict[str, object] = {}
    exec(compile(EASYCONFIG.read_text(), str(EASYCONFIG), "exec"), {}, values)  # as EasyBuild reads it
    assert (values["name"], values["version"]) == ("cputrain", __version__)
    assert EASYCONFIG.name == f"{values['name']}-{values['version']}-{values['toolchain']['name']}-2024a.eb"
    for field in ("easyblock", "homepage", "description", "toolchain", "moduleclass", "sanity_check_paths"):
        assert values[field]
    bundles, modules = {"annotated-types": "pydantic", "numpy": "SciPy-bundle"}, {"torch": "pytorch"}
    there = {entry[0].lower().replace("_", "-"): entry[1] for entry in (*values["dependencies"], *values["exts_list"])}
    for name, requirement in NEEDED.items():
        if name in bundles:
            assert bundles[name].lower() in there
        else:
            assert requirement.specifier.contains(there[modules.get(name, name).lower()]), name
