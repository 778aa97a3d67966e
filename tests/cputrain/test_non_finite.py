"""NaN, Inf and diverging losses: they are reported, and handled as on_nan requests."""

import math
from pathlib import Path

import pytest
import torch

from cputrain.runs.events import read_events
from cputrain.training.snapshot import TrainProgress
from cputrain.training.step import EpochMetrics, StepResult, StepSettings
from cputrain.training.watchers.order import DivergenceCheck
from tests.support.checkpoints import content
from tests.support.commands import needs_two_cores
from tests.support.forked import in_fork
from tests.support.trainings import SMALL, trained

pytestmark = needs_two_cores
WHERE = "rank 1: loss nan at step 2, first NaN or Inf in the output of relu.1, learning rate "


def lossy(on_nan: str) -> tuple[str, ...]:
    settings = (f"on_nan={on_nan}", "schedule.peak_rate=0.01", f"output={on_nan}", "comm.backend=gloo")
    return ("imagefolder", *SMALL, *settings)


def warnings(run: Path) -> list[str]:
    return [event["what"] for event in read_events(run) if event["event"] == "warning"]


@pytest.mark.parametrize(
    ("scores", "best"), [([math.nan, 1.0, math.nan, 0.5, 2.0], [1.0, 2.0]), ([math.nan] * 2, []), ([0.0, 0.0], [0.0])]
)
def test_nan_is_never_the_best_score(scores: list[float], best: list[float]) -> None:
    progress, found = TrainProgress(), []
    for score in scores:
        if progress.improves(score):
            progress.best_score = score
            found.append(score)
    assert found == best


def test_nan_is_reported_and_handled_as_on_nan_requests(place: Path) -> None:
    """Rank 1 of two gets NaN in the third of four steps: the step is skipped, rolled back, or the training stops."""
    result = trained(place, 2, lossy("skip"), lossy("rollback"), lossy("stop"), poison=3)
    assert result.returncode == 1
    stopped = f"{WHERE}0.01: lower schedule.peak_rate, or set on_nan to skip or rollback; checkpoint "
    assert f"{stopped}stop/checkpoints/step-0000002 is kept" in result.stderr
    assert warnings(place / "skip") == [f"{WHERE}0.01: the step is skipped"]
    back = f"{WHERE}0.01: restored step-0000002, training continues with the next images"
    assert warnings(place / "rollback") == [back]
    for run in ("skip", "rollback"):
        assert read_events(place / run)[-1]["status"] == "done" and read_events(place / run)[-1]["steps"] == 4
    for run, last in (("skip", 4), ("rollback", 4), ("stop", 2)):
        state = content(place / run / f"checkpoints/step-{last:07d}")["model"]
        assert all(bool(torch.isfinite(value.double()).all()) for value in state.values())


def test_rollback_without_a_checkpoint_stops(place: Path) -> None:
    result = trained(place, 2, lossy("rollback"), poison=1)
    assert result.returncode == 1 and "rank 1: loss nan at step 0" in result.stderr


def test_a_loss_that_diverges_is_reported_once(place: Path) -> None:
    """A linear model at a rate that is far too high, on images whose labels mean nothing."""
    train = place / "images/train"
    for i in range(0, 9, 2):
        one, other = train / f"class0/{i:03d}.jpg", train / f"class1/{i:03d}.jpg"
        kept = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(kept)
    diverging = (
        "model.name=linear",
        "model.zero_gamma=none",
        "schedule.start_rate=3",
        "schedule.peak_rate=3",
        "epochs=4",
    )
    result = in_fork("train", "imagefolder", *SMALL, "plan.ppn=1", "plan.threads=1", *diverging, cwd=place)
    assert result.returncode == 0, result.stderr
    (warned,) = warnings(place / "run")
    assert warned.startswith("the loss is ")
    assert "times the loss of the first step, learning rate 3: lower schedule.peak_rate, or lengthen the" in warned
    assert warned in (place / "run/report.html").read_text().replace("&#39;", "'")


def test_only_a_positive_first_loss_tells_that_one_diverges() -> None:
    """A loss of one's own code may be negative, or 0 at first."""
    settings = StepSettings(images=8, passes=1, lr=0.1, weight_decay=0.0)
    of_step = {"data_wait_s": 0.0, "comm_wait_s": 0.0, "metrics": EpochMetrics(), "layer_ratios": ()}
    for losses, warned in (((-1.0, -4.0, 20.0), 0), ((0.0, 1.0), 0), ((1.0, 9.0, 11.0, 12.0), 1)):
        lines: list[str] = []
        check = DivergenceCheck(warn=lambda _, line, lines=lines: lines.append(line), progress=TrainProgress())
        for step, loss in enumerate(losses):
            check.after_step(step, settings, StepResult(loss=loss, finite=True, non_finite="", **of_step), 1.0)
        assert len(lines) == warned, losses
