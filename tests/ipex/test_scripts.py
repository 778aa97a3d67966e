"""Scripts for Intel's extension have the same losses with the original on torch 2.8 and with the stand-in on current
torch."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import intel_extension_for_pytorch as original
import pytest
import torch
from intel_extension_for_pytorch.optim import _lamb, _lars

from tests.cputrain.test_ipex_stand_in import ARGUMENTS, SCRIPTS, STAND_INS
from tests.support.forked import ROOT

CURRENT = ROOT / ".venv/bin/python"


def lines_of(python: Path, script: str, *options: str, **variables: str) -> list[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "2", **variables}
    result = subprocess.run(
        (python, SCRIPTS / f"{script}.py", *options), capture_output=True, text=True, timeout=500, env=env
    )
    assert result.returncode == 0, result.stderr
    return [line for line in result.stdout.splitlines() if line.startswith(("step", "correct"))]


def test_the_stand_in_has_the_original_s_arguments() -> None:
    assert tuple(inspect.signature(original.optimize).parameters) == ARGUMENTS
    for name, optimizer in (("_lars", _lars.Lars), ("_lamb", _lamb.Lamb)):
        ours = (STAND_INS / f"intel_extension_for_pytorch/optim/{name}.py").read_text(encoding="utf-8")
        assert all(f" {argument}: " in ours for argument in inspect.signature(optimizer).parameters)


@pytest.mark.skipif(not CURRENT.exists(), reason="needs .venv with current torch: make install")
@pytest.mark.parametrize(
    ("script", "bf16", "first", "later"),
    [
        # Batch-norm over few values makes the difference in rounding large within a step.
        pytest.param("resnet50", False, 1e-4, 5e-2, marks=pytest.mark.nightly),
        ("resnet50", True, 2e-2, 2e-1),
        ("bert", False, 1e-5, 1e-4),
        pytest.param("bert", True, 1e-3, 1e-2, marks=pytest.mark.nightly),
    ],
)
def test_scripts_have_the_original_s_losses(script: str, bf16: bool, first: float, later: float) -> None:
    # Without AVX-512 the original has no blocked weights in bfloat16.
    options = ("--bf16", *(() if "AVX512" in torch.backends.cpu.get_cpu_capability() else ("--no-prepack",)))
    words = options if bf16 else ()
    expected = lines_of(Path(sys.executable), script, *words)
    found = lines_of(CURRENT, script, *words, PYTHONPATH=str(STAND_INS))
    losses = [[float(line.split()[-1]) for line in lines if line[0] == "s"] for lines in (found, expected)]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=first)
    assert losses[0] == pytest.approx(losses[1], rel=later)
    assert len(found) == len(expected) > 2


@pytest.mark.skipif(not CURRENT.exists(), reason="needs .venv with current torch: make install")
def test_the_side_by_side_prints_a_ratio() -> None:
    sizes = ("--batch", "1", "--size", "64", "--rounds", "1")
    words = (CURRENT, "-m", "benchmarks.ipex", "mobilenet_v3_large:bfloat16", "--original", sys.executable, *sizes)
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    row = [cell.strip() for cell in result.stdout.splitlines()[-1].strip("|").split("|")]
    assert row[:2] == ["mobilenet_v3_large", "bfloat16"] and min(map(float, row[2:])) > 0, result.stdout
