"""Trainings by engine=native have the kernels below torch's operators, and leave none behind."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cputrain.affinity.errors import InputError, RunError
from cputrain.kernels.operators import registered, registration_restored
from cputrain.manifest import TrainingRecord, read_manifest
from cputrain.training import engine as engines
from cputrain.training.engine import Engine, agree_on_operators, choose_engine, register_operators, with_operators_of
from tests.support.checkpoints import newest
from tests.support.forked import ended, forked

ROOT = Path(__file__).parents[2]
HERE = {name: text for name, text in os.environ.items() if name != "CPUTRAIN_KERNELS"}  # and where the cache is
NATIVE = Engine(name="native", why="", operators=True)
TRAINING = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from cputrain import train
from cputrain.kernels.operators import calls, enable

if sys.argv[3] == "True":
    enable()

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


@pytest.fixture
def torch_s_afterwards() -> Iterator[None]:
    with registration_restored():
        yield


def trained(folder: Path, steps: int, engine: str, *, enabled: bool = False, **variables: str) -> str:
    """Return what a training prints, and its checkpoint says, of the kernels; `enabled`: by the program before."""
    words = ("-c", TRAINING, str(steps), engine, str(enabled))
    with forked(*words, cwd=folder, PYTHONPATH=str(ROOT), **variables) as process:
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
    """Also where the program has registered them, which it gets back."""
    assert (
        trained(tmp_path, 2, "auto", CPUTRAIN_KERNELS="off")
        == "operators False, called False, after it False, saved False"
    )
    without = trained(tmp_path, 4, "auto", enabled=True)
    assert without == "operators False, called False, after it True, saved False"


@pytest.mark.slow
def test_torch_s_engine_has_torch_s_operators(tmp_path: Path) -> None:
    assert trained(tmp_path, 2, "eager", enabled=True) == "operators False, called False, after it True, saved False"


@pytest.mark.parametrize(
    ("had", "env", "has"),
    [
        (True, HERE, True),
        (False, {**HERE, "CPUTRAIN_KERNELS": "auto"}, False),
        (None, HERE, False),  # of an earlier version
        (None, {**HERE, "CPUTRAIN_KERNELS": "auto"}, True),  # the same, launched by `cputrain launch`
    ],
)
@pytest.mark.usefixtures("torch_s_afterwards")
def test_a_resumed_run_has_them_if_its_checkpoint_had(had: bool | None, env: dict[str, str], has: bool) -> None:
    checkpoint = cast(TrainingRecord, SimpleNamespace(operators=had))
    assert register_operators(NATIVE, env) == ""
    assert with_operators_of(checkpoint, NATIVE, env).operators is has
    assert registered() is has
    assert not with_operators_of(checkpoint, Engine(name="eager", why=""), env).operators


def test_engines_that_have_them() -> None:
    assert not choose_engine("eager", "float32", HERE).operators
    assert choose_engine("native", "float32", HERE).operators


@pytest.mark.usefixtures("group", "torch_s_afterwards")
def test_no_rank_has_them_unless_all_can(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    native = choose_engine("native", "float32", HERE)
    off = {**HERE, "CPUTRAIN_KERNELS": "off"}
    for problems, agreed in ((["", ""], True), ([register_operators(native, off)] * 2, False)):
        assert register_operators(native, HERE) == ""
        assert agree_on_operators(problems, native).operators is registered() is agreed
        assert caplog.messages == []
    for problem in ("no C++ compiler", "CPUTRAIN_KERNELS=off"):
        register_operators(native, HERE)
        assert not agree_on_operators(["", problem], native).operators
        assert not registered()
        assert caplog.messages == [f"cputrain: torch's operators stay in place: rank 1: {problem}"]
        caplog.clear()
    # Another rank has torch's engine, for which it has told why.
    register_operators(native, HERE)
    assert not agree_on_operators(["", ""], Engine(name="eager", why="")).operators
    assert not registered()

    def fails(_: object) -> None:
        raise RunError("does not compile")

    monkeypatch.setattr(engines, "enable", fails)
    assert register_operators(native, HERE) == "does not compile"
    with pytest.raises(InputError, match="CPUTRAIN_KERNELS=no: give auto or off"):
        register_operators(native, {**HERE, "CPUTRAIN_KERNELS": "no"})
