"""Trainings by engine=native have the kernels below torch's operators, and leave none behind."""

from pathlib import Path

import pytest

from cputrain.affinity.errors import RunError
from cputrain.kernels.operators import disable
from cputrain.manifest import read_manifest
from cputrain.training import engine as engines
from cputrain.training.engine import Engine, agree_on_operators, choose_engine, register_operators
from tests.support.checkpoints import newest
from tests.support.forked import ended, forked

ROOT = Path(__file__).parents[2]
NATIVE = Engine(name="native", why="", operators=True)
TRAINING = """
import json, os, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from cputrain import train
from cputrain.kernels.operators import calls, enable_if_requested

enable_if_requested(os.environ)

def depthwise():
    return calls()["depthwise"]

images = TensorDataset(torch.randn(8, 3, 9, 9), torch.arange(8) % 2)
layers = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 5, groups=16), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(144, 2)
settings = {"epochs": 2, "max_steps": int(sys.argv[1]), "engine": sys.argv[2], "batch.local": 4}
settings |= {"schedule.warmup_epochs": 0, "comm.backend": "gloo", "checkpoint.every_epochs": 1}
resume = settings["max_steps"] > 2
network = nn.Sequential(*layers)
train(network, nn.CrossEntropyLoss(), images, images, classes=("a", "b"), settings=settings, resume=resume)
trained = depthwise()
layers[1](torch.randn(2, 16, 9, 9)).sum().backward()
said = json.loads(Path("runs/training/environment.json").read_text())["operators"]
print(f"operators {said}, called {trained > 0}, after it {depthwise() > trained}")
"""


def trained(folder: Path, steps: int, engine: str, kernels: str = "") -> str:
    """Return what a training prints, and its checkpoint says, of the kernels."""
    variables = {"CPUTRAIN_KERNELS": kernels} if kernels else {}
    with forked("-c", TRAINING, str(steps), engine, cwd=folder, PYTHONPATH=str(ROOT), **variables) as process:
        end = ended(process)
    assert end.status == 0, end.err
    line = next(line for line in end.out.splitlines() if line.startswith("operators "))
    return f"{line}, saved {read_manifest(newest(folder / 'runs/training')).training.operators}"


@pytest.mark.slow
def test_a_native_training_has_them_and_takes_them_away(tmp_path: Path) -> None:
    assert trained(tmp_path, 2, "auto") == "operators True, called True, after it False, saved True"
    assert trained(tmp_path, 4, "auto") == "operators True, called True, after it False, saved True"


@pytest.mark.slow
def test_a_run_that_began_without_them_goes_on_without_them(tmp_path: Path) -> None:
    """Also one of an earlier version, whose checkpoints do not say: bit for bit as it was."""
    without = "operators False, called False, after it False, saved False"
    assert trained(tmp_path, 2, "auto", "off") == without
    assert trained(tmp_path, 4, "auto") == without


@pytest.mark.slow
def test_torch_s_engine_has_torch_s_operators_unless_they_are_asked_for(tmp_path: Path) -> None:
    """A program's own wish for them lasts."""
    assert trained(tmp_path, 2, "eager") == "operators False, called False, after it False, saved False"
    assert trained(tmp_path, 4, "eager", "auto") == "operators False, called True, after it True, saved False"


def test_engines_have_them_unless_the_environment_forbids_it() -> None:
    assert not choose_engine("eager", "float32", {}).operators
    assert choose_engine("native", "float32", {}).operators
    assert not choose_engine("native", "float32", {"CPUTRAIN_KERNELS": "off"}).operators


@pytest.mark.usefixtures("group")
def test_no_rank_has_them_unless_all_have(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert register_operators(NATIVE, {}) == ""
    assert agree_on_operators([(True, ""), (True, "")], NATIVE, {}).operators
    assert not agree_on_operators([(True, ""), (False, "")], NATIVE, {}).operators  # CPUTRAIN_KERNELS=off there
    assert not agree_on_operators([(True, ""), (True, "no C++ compiler")], NATIVE, {}).operators
    assert caplog.messages == ["cputrain: torch's operators stay in place: rank 1: no C++ compiler"]

    def fails(_: object) -> None:
        raise RunError("does not compile")

    monkeypatch.setattr(engines, "enable", fails)
    assert register_operators(NATIVE, {}) == "does not compile"
    disable()
