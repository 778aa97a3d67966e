"""What a training prints as it goes on: the bar's figures, and how little with --quiet."""

from typing import Any

import pytest

from cputrain.recipe import Recipe
from cputrain.runs import SilentEvents
from cputrain.training import EpochMetrics, Progress, StepResult, StepSettings, TrainingLog

RESULT = StepResult(
    loss=0.5, data_wait_s=0.2, comm_wait_s=0.5, metrics=EpochMetrics(), finite=True, non_finite="", layer_ratios=()
)
EPOCH: dict[str, Any] = {"train_loss": 1.0, "train_top1": 50.0, "accuracy": None, "seconds": 9.0, "images": 640}


def train(*, quiet: bool) -> None:
    """Two steps of a second and an epoch."""
    progress = Progress(0, 640, unit=" img", shown=True, bar=not quiet, redraw_s=0.0)
    sizes = {"last_step": 540, "steps_per_epoch": 36}
    log = TrainingLog(recipe=Recipe(epochs=15), progress=progress, events=SilentEvents(), **sizes, quiet=quiet)
    settings = StepSettings(images=32, passes=1, lr=0.1, weight_decay=0.0)
    for step in (1, 2):
        log.after_step(step, settings, RESULT, 1.0)
    log.epoch(step=36, epoch=1, **EPOCH)
    log.warn(36, "the disk is almost full")
    progress.close()


def test_the_bar_has_epoch_step_speed_loss_rate_time_left_and_the_shares_of_waiting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(quiet=False)
    out, err = capsys.readouterr()
    bar = err.split("\r")
    last = next(line for line in reversed(bar) if "step 2" in line)
    assert last.startswith("epoch 1/15 step 2/540 |") and " left " in last and "img/s" in last
    assert "loss 0.5000, lr 0.1, data 20 %, comm 50 %" in last
    assert "epoch 1/15  loss 1.0000  acc 50.00  9.0 s" in out and "warning: the disk is almost full" in out


def test_quiet_leaves_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    train(quiet=True)
    out, err = capsys.readouterr()
    assert out == "warning: the disk is almost full\n" and "step" not in err
