"""What a training prints at its end."""

from cputrain.runs import TimeSpent
from cputrain.training import Accuracy, TrainResult, summary_lines

SPENT = TimeSpent(training_s=2.0, wall_s=2.0, starts=1)
ACCURACY = Accuracy(top1=50.0, top5=100.0, loss=0.5, images=8, damaged=())


def lines(step: int, accuracy: Accuracy | None) -> list[str]:
    result = TrainResult(accuracy=accuracy, test=None, step=step, trained_s=1.0, ended={"time": 0.0})
    return summary_lines(result, 1_200, SPENT, "images", 1 << 30, None)


def test_an_end_by_max_steps_is_said() -> None:
    assert lines(1_000, ACCURACY)[0] == "ended by max_steps   after step 1,000 of 1,200"
    assert lines(1_200, ACCURACY)[0].startswith("total training time")
    assert lines(1_200, ACCURACY) == lines(1_000, ACCURACY)[1:]


def test_a_training_that_was_stopped_says_how_to_continue() -> None:
    """Ranks that cputrain watches are stopped by one signal, whichever it has got."""
    assert lines(7, None) == ["stopped by a signal  after step 7, checkpoint saved: continue with --resume"]
