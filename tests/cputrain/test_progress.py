"""What a training prints as it goes on and at its end: the bar's figures, how little with --quiet, the summary."""

from pathlib import Path
from typing import Any

import pytest

from cputrain.mpi.supervise.run import free_port
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import SilentEvents, TimeSpent
from cputrain.training.progress import TrainingBar
from cputrain.training.run_folder import summary_lines
from cputrain.training.step import Accuracy, EpochMetrics, StepResult, StepSettings, TrainResult
from cputrain.training.watchers.log import TrainingLog
from tests.support.forked import in_fork

RESULT = StepResult(
    loss=0.5, data_wait_s=0.2, comm_wait_s=0.5, metrics=EpochMetrics(), finite=True, non_finite="", layer_ratios=()
)
EPOCH: dict[str, Any] = {"train_loss": 1.0, "train_top1": 50.0, "accuracy": None, "seconds": 9.0, "images": 640}


def train(*, quiet: bool, redrawn: bool = True) -> None:
    """Two steps of a second and an epoch."""
    progress_bar = TrainingBar(0, 640, unit=" img", shown=True, bar=not quiet, redrawn=redrawn, redraw_s=0.0)
    progress_bar.line("a note")
    sizes = {"last_step": 540, "steps_per_epoch": 36}
    log = TrainingLog(epochs=15, kind="images", bar=progress_bar, events=SilentEvents(), **sizes, quiet=quiet)
    settings = StepSettings(images=32, passes=1, lr=0.1, weight_decay=0.0)
    for step in (1, 2):
        log.after_step(step, settings, RESULT, 1.0)
    log.epoch(step=36, epoch=1, **EPOCH)
    log.warn(36, "the disk is almost full")
    progress_bar.close()


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


def test_without_a_terminal_the_bar_is_a_line_at_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(quiet=False, redrawn=False)
    out, err = capsys.readouterr()
    assert [line.partition("  ")[0] for line in out.splitlines()] == [
        "a note",
        "epoch 1/15",
        "warning: the disk is almost full",
    ]
    monkeypatch.setattr("cputrain.training.progress.PLAIN_S", 0.0)
    train(quiet=False, redrawn=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("epoch 1/15 step 2/540 |")] and not err
    assert "a note" in lines and "\r" not in out


@pytest.mark.slow
def test_a_rank_of_another_launcher_prints_no_bar_into_its_output(tmp_path: Path) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TQDM_DISABLE": ""}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = in_fork("train", "linear-regression", "max_steps=3", "output=run", cwd=tmp_path, **rank, **meeting)
    assert done.returncode == 0 and "epoch 3/1000  loss" in done.stdout, done.stderr
    assert "\r" not in done.stdout + done.stderr and "first step" not in done.stderr


def test_quiet_leaves_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    train(quiet=True)
    out, err = capsys.readouterr()
    assert out == "a note\nwarning: the disk is almost full\n" and "step" not in err


SPENT = TimeSpent(training_s=2.0, wall_s=2.0, starts=1)
ACCURACY = Accuracy(top1=50.0, top5=100.0, loss=0.5, images=8, damaged=())


def lines(step: int, accuracy: Accuracy | None, path: str | None = None) -> list[str]:
    result = TrainResult(accuracy=accuracy, test=None, step=step, trained_s=1.0, ended={"time": 0.0})
    recipe = Recipe(name="demo", data={"path": path})
    about = {"kind": recipe.data.kind, "resume": recipe.wording("resume", "true")}
    return summary_lines(result, 1_200, SPENT, **about, peak_bytes=1 << 30, estimate_bytes=None)


def test_an_end_by_max_steps_is_said() -> None:
    assert lines(1_000, ACCURACY)[0] == "ended by max_steps   after step 1,000 of 1,200"
    assert lines(1_200, ACCURACY)[0].startswith("total training time")
    assert lines(1_200, ACCURACY) == lines(1_000, ACCURACY)[1:]


def test_a_training_that_was_stopped_says_how_to_continue() -> None:
    """Ranks that cputrain watches are stopped by one signal, whichever it has got."""
    assert lines(7, None) == ["stopped by a signal  after step 7, checkpoint saved: continue with --resume"]
    assert lines(7, None, "own")[0].endswith("continue with resume=True"), "by cputrain.train of a script"
