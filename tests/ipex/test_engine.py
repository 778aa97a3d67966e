"""engine=ipex with torch 2.8 and its extension: trainings that end where the other engines' do, on two ranks."""

import json
from pathlib import Path
from statistics import mean

import pytest

from cputrain.runs.events import read_events
from tests.support.commands import cputrain
from tests.support.images import write_images
from tests.support.trainings import LENET, RESNET18, SMALL

OURS = (*SMALL, *RESNET18, "plan.ppn=2", "plan.oversubscribe=true")


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in read_events(folder) if event["event"] == "step"]


@pytest.mark.parametrize("precision", ["float32", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_it_trains_as_torch_s_own_operators_do(tmp_path: Path, precision: str) -> None:
    write_images(tmp_path / "images", train=9, val=7)
    for engine in ("ipex", "eager"):
        settings = (f"engine={engine}", f"precision={precision}", f"output={engine}")
        result = cputrain("train", "imagefolder", *OURS, *settings, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert json.loads((tmp_path / engine / "environment.json").read_text())["engine"] == engine
    wide = 1e-3 if precision == "float32" else 5e-2
    assert losses(tmp_path / "ipex") == pytest.approx(losses(tmp_path / "eager"), rel=wide)
    assert len(losses(tmp_path / "ipex")) > 2


def test_its_checkpoints_are_every_engine_s(tmp_path: Path) -> None:
    """A network without batch-norm: statistics of 6 images make the engines' different rounding large in a step, and a
    lost momentum would look the same."""
    write_images(tmp_path / "images", train=9, val=7)
    lenet = ("imagefolder", *OURS, *LENET)
    whole, cut = ("engine=ipex", "output=whole"), ("engine=ipex", "output=cut")
    for settings in (whole, (*cut, "max_steps=2")):
        result = cputrain("train", *lenet, *settings, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    resumed = cputrain("train", *lenet, "engine=native", "output=cut", "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_the_demo_trains_on_two_ranks_over_oneccl(tmp_path: Path) -> None:
    made = cputrain("prepare", "digits", "folder", "digits", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    settings = ("data.path=digits", "engine=ipex", "comm.backend=ccl", "plan.ppn=2", "max_steps=24", "output=run")
    result = cputrain("train", "demo-digits", *settings, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "backend ccl over " in result.stdout and ", engine ipex, " in result.stdout
    steps = losses(tmp_path / "run")
    assert len(steps) == 24 and mean(steps[-6:]) < mean(steps[:6])
