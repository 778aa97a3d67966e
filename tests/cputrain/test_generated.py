"""Data that nobody stores: synthetic images, and a line's points for linear regression, through the whole trainer."""

import json
from pathlib import Path

import numpy as np
import pytest

from cputrain.data.formats.dataset import INTERCEPT, SLOPE, Points, SyntheticImages
from cputrain.data.from_settings import TRAIN_POINTS, VAL_POINTS
from cputrain.data.loader import point_batches
from cputrain.runs.events import read_events
from tests.support.checkpoints import content, newest
from tests.support.commands import PPN
from tests.support.forked import in_fork
from tests.support.trainings import trained

SYNTHETIC = (
    "imagefolder",
    "data.path=synthetic",
    "data.train_images=8",
    "model.name=resnet18",
    "model.classes=7",
    "data.crop=32",
    "batch.local=4",
    "epochs=2",
    "schedule.warmup_epochs=0",
    "phases=[{from_epoch: 1, crop: 40}]",
    *("engine=eager", "plan.ppn=1", "plan.threads=1"),
)


def test_synthetic_images_are_random_and_the_seed_s() -> None:
    one, same, other = (SyntheticImages(200, 7, 32, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.labels, same.labels) and not np.array_equal(one.labels, other.labels)
    assert set(one.labels) == set(range(7)) and len(one) == 200
    places = np.zeros((3, 24, 24, 3), dtype=np.uint8)
    assert one.decode([one.read(i) for i in (5, 6, 5 + 64)], [], places) == [None, None, None]
    assert np.array_equal(places[0], places[2]) and not np.array_equal(places[0], places[1])
    assert places[0].std() > 60  # uniform over 0 to 255: 74


def test_points_lie_about_their_line() -> None:
    points = Points(10_000, 1, 0)
    slope, intercept = np.polyfit(points.x[:, 0], points.y[:, 0], 1)
    assert (slope, intercept) == (pytest.approx(SLOPE, abs=0.02), pytest.approx(INTERCEPT, abs=0.05))
    assert not np.array_equal(points.x[:5], Points(5, 1, 1).x), "validation has points of its own"
    (batch,) = point_batches(points, [np.array([3, 1])])
    assert batch.images.shape == batch.labels.shape == (2, 1) and batch.images[0] == points.x[3]


@pytest.mark.long
def test_a_training_on_synthetic_images_says_so_everywhere(tmp_path: Path) -> None:
    made = in_fork("train", *SYNTHETIC, "output=run", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "resnet18, synthetic data: 8 images of random pixels, 7 classes, no evaluation" in made.stdout
    assert "img/s, synthetic data)" in made.stdout and "val " not in made.stdout
    assert "data                 synthetic data: nothing to evaluate" in made.stdout and "top-" not in made.stdout
    events = read_events(tmp_path / "run")
    start, end = events[0], events[-1]
    assert start["data"] == end["data"] == "synthetic data"
    assert (end["status"], end["top1"], end["val_loss"], end["images"]) == ("done", None, None, 16)
    report = (tmp_path / "run/report.html").read_text()
    assert "of 7 classes (synthetic data)" in report


@pytest.mark.long
@pytest.mark.nightly
def test_linear_regression_finds_the_least_squares_line_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Adam at the lab's rate, on one rank and on two: the line of numpy's least squares, and the same losses."""
    common = ("linear-regression", "optim.name=adam", "schedule.peak_rate=0.1", "comm.backend=gloo", "epochs=300")
    for ppn in {1, PPN}:
        made = trained(tmp_path, ppn, (*common, f"plan.ppn={ppn}", f"output=run{ppn}"))
        assert made.returncode == 0, made.stderr
    assert "validation loss" in made.stdout and "acc " not in made.stdout and "top-1" not in made.stdout
    points = Points(TRAIN_POINTS, 1, 0)
    weights = content(newest(tmp_path / f"run{PPN}"))["model"]
    slope, intercept = np.polyfit(points.x[:, 0], points.y[:, 0], 1)
    assert float(weights["fc.weight"]) == pytest.approx(slope, abs=1e-2)
    assert float(weights["fc.bias"]) == pytest.approx(intercept, abs=5e-2)
    losses = [
        [event["train_loss"] for event in read_events(tmp_path / f"run{ppn}") if event["event"] == "epoch"]
        for ppn in (1, PPN)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3) and losses[0][-1] < losses[0][0] / 50
    epochs = [event for event in read_events(tmp_path / "run1") if event["event"] == "epoch"]
    assert {event["train_top1"] for event in epochs} == {event["val_top1"] for event in epochs} == {None}
    end = read_events(tmp_path / "run1")[-1]
    held_out = Points(VAL_POINTS, 1, 1)
    residual = held_out.y - (float(weights["fc.weight"]) * held_out.x + float(weights["fc.bias"]))
    assert end["val_loss"] == pytest.approx(float(np.square(residual).mean()), rel=1e-2)
    assert "Accuracy" not in (tmp_path / "run1/report.html").read_text()
    expected = in_fork("eval", *common, "--checkpoint", "run1/checkpoints/best", cwd=tmp_path)
    assert expected.returncode == 0 and "50 points, each once" in expected.stdout and "top-1" not in expected.stdout


@pytest.mark.long
def test_a_sweep_of_linear_regressions_is_a_table_of_losses(tmp_path: Path) -> None:
    rates = ("--grid", "schedule.peak_rate=0.005,0.05")
    swept = in_fork("sweep", "linear-regression", "epochs=80", *rates, cwd=tmp_path)
    assert swept.returncode == 1 and "times the loss of the first step" in swept.stdout, "0.05 diverges, as in the lab"
    runs = json.loads((tmp_path / "runs/linear-regression-sweep/sweep.json").read_text())["runs"]
    assert runs[0]["status"] == "done" and runs[0]["data"] == "points" and runs[0]["val_loss"] > 0
    assert "val loss" in swept.stdout and f"{runs[0]['val_loss']:.4f}" in swept.stdout
