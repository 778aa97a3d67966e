"""NaN, infinity and exploding losses: named, and what the recipe wants then."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from affinity.sysfs import this_machine
from cputrain.events import read_events
from tests.conftest import cputrain, write_images
from tests.test_training import SMALL

pytestmark = pytest.mark.skipif(len(this_machine().allowed_cores) < 2, reason="needs two cores")
WHERE = "rank 1: loss nan at step 2, no number first in the output of relu.1, learning rate "


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", train=9, val=7)
    return tmp_path


def poisoned(place: Path, on_nan: str, step: int = 3) -> subprocess.CompletedProcess[str]:
    """A training of 2 epochs x 2 steps on two ranks whose third step loses all numbers on rank 1."""
    train = ("train", "imagefolder", *SMALL, f"on_nan={on_nan}", "schedule.peak_rate=0.01")
    ranks = ("--", sys.executable, "-m", "tests.poisoned", str(step), *train)
    return cputrain("launch", "--ppn", "2", *ranks, cwd=place, PYTHONPATH=str(Path(__file__).parents[1]))


def finite(place: Path) -> bool:
    state = torch.load(sorted((place / "run/checkpoints").glob("step-*.pt"))[-1], weights_only=True)
    return all(bool(torch.isfinite(value.double()).all()) for value in state["model"].values())


def test_stop_names_step_rank_layer_and_rate_and_keeps_the_checkpoint(place: Path) -> None:
    result = poisoned(place, "stop")
    assert result.returncode == 1
    assert f"{WHERE}0.01: lower the peak rate, or see on_nan" in result.stderr
    assert "run/checkpoints/step-0000002.pt is kept" in result.stderr and finite(place)


def test_skip_leaves_the_step_out(place: Path) -> None:
    result = poisoned(place, "skip")
    assert result.returncode == 0, result.stderr
    warned = [event for event in read_events(place / "run") if event["event"] == "warning"]
    assert [event["what"] for event in warned] == [f"{WHERE}0.01: the step is left out"]
    assert read_events(place / "run")[-1]["steps"] == 4 and finite(place)


def test_rollback_goes_back_to_the_last_checkpoint_and_on(place: Path) -> None:
    result = poisoned(place, "rollback")
    assert result.returncode == 0, result.stderr
    told = f"{WHERE}0.01: back to the weights of step-0000002.pt, on with the next images"
    assert [event["what"] for event in read_events(place / "run") if event["event"] == "warning"] == [told]
    assert finite(place)
    assert read_events(place / "run")[-1]["status"] == "done"


def test_rollback_without_a_checkpoint_stops(place: Path) -> None:
    result = poisoned(place, "rollback", step=1)
    assert result.returncode == 1 and "rank 1: loss nan at step 0" in result.stderr


def test_a_loss_that_explodes_is_warned_of_once(place: Path) -> None:
    """A linear model at a rate that is far too high, on images whose labels mean nothing."""
    train = place / "images/train"
    for i in range(0, 9, 2):
        one, other = train / f"class0/{i:03d}.jpg", train / f"class1/{i:03d}.jpg"
        kept = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(kept)
    explosive = (
        "model.name=linear",
        "model.zero_gamma=none",
        "schedule.start_rate=3",
        "schedule.peak_rate=3",
        "epochs=4",
    )
    result = cputrain("train", "imagefolder", *SMALL, *explosive, cwd=place)
    assert result.returncode == 0, result.stderr
    warned = [event["what"] for event in read_events(place / "run") if event["event"] == "warning"]
    assert len(warned) == 1 and warned[0].startswith("the loss is ")
    assert "times the first step's, learning rate 3: lower the peak rate, or warm up for longer" in warned[0]
    assert warned[0] in (place / "run/report.html").read_text().replace("&#39;", "'")
