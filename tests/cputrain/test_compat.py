"""The distribution in compat/, built and installed beside others: the module names of Intel's bindings."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.forked import ROOT

USES = """
import importlib.metadata, importlib.util, os
import torch.distributed as dist
import oneccl_bindings_for_pytorch, torch_ccl
print(oneccl_bindings_for_pytorch.__file__)
import intel_extension_for_pytorch as ipex
print(ipex.__file__, importlib.util.find_spec("intel_extension_for_pytorch.cpu.launch") is not None)
print(dist.is_backend_available("ccl"), importlib.metadata.version("oneccl_bind_pt"), os.environ["CCL_WORKER_COUNT"])
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with this one's packages and the wheel."""
    folder = tmp_path / "compat"
    folder.mkdir()
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    offline = ("--no-index", "--no-deps")
    run(
        sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder), cwd=ROOT / "compat"
    )
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    here = next((folder / "venv/lib").glob("python3*/site-packages"))
    # `addsitedir` also reads the .pth files of that folder: this checkout is installed by one.
    (here / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    run(*pip, "--python", str(folder / "venv/bin/python"), "install", *offline, *wheels(folder))
    return folder / "venv"


def wheels(folder: Path) -> list[str]:
    return [str(path) for path in folder.glob("cputrain_compat-*.whl")]


def run(*argv: str, cwd: Path | None = None) -> str:
    result = subprocess.run(argv, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_script_that_imports_intel_s_bindings_finds_the_backend_and_an_original_comes_first(
    environment: Path, tmp_path: Path
) -> None:
    found, extension, answers = run(str(environment / "bin/python"), "-c", USES, cwd=tmp_path).splitlines()
    assert Path(found).is_relative_to(environment) and "cputrain_stand_ins" in found
    assert "cputrain_stand_ins" in extension and extension.endswith(" True")
    assert answers == "True 2.8.0 1"
    printed = subprocess.run((environment / "bin/ipexrun", "xpu", "x.py"), capture_output=True, text=True)
    assert (printed.returncode, printed.stderr) == (2, "ipexrun: ipexrun xpu: cputrain starts processes on CPUs\n")
    # Wherever it is on the module path, as the .pth file puts the stand-ins at the end.
    place = next((environment / "lib").glob("python3*/site-packages"))
    (place / "torch_ccl.py").write_text("name = 'the original'\n")
    (place / "intel_extension_for_pytorch.py").write_text("name = 'the original'\n")
    code = "import torch_ccl, intel_extension_for_pytorch as ipex; print(torch_ccl.name, ipex.name)"
    assert run(str(environment / "bin/python"), "-c", code, cwd=tmp_path) == "the original the original\n"
