"""The summary that `train` prints at its end."""

from affinity.units import GIB
from cputrain.runs.events import TimeSpent
from cputrain.training.loop import TrainResult
from cputrain.training.metrics import Accuracy


def summary_lines(
    result: TrainResult, steps: int, spent: TimeSpent, kind: str, peak_bytes: int, estimate_bytes: int | None
) -> list[str]:
    """Times, accuracies and memory of a training that has `steps` in all its epochs; `kind` is the recipe's data.kind,
    the bytes are of one worker."""
    accuracy = result.accuracy
    if accuracy is None:
        return [f"stopped by a signal  after step {result.step:,}, checkpoint saved: continue with --resume"]
    resumed = spent.starts > 1
    of_last = ", of the last start" if resumed else ""
    starts = f" over {spent.starts} starts" if resumed else ""
    lines = [f"ended by max_steps   after step {result.step:,} of {steps:,}"] if result.step < steps else []
    lines += [
        f"total training time  {result.trained_s:.1f} s (updates only{of_last})",
        f"time to train        {spent.training_s:.1f} s{starts} (with evaluations and checkpoints)",
    ]
    if resumed:
        lines.append(f"wall time            {spent.wall_s:.1f} s (from the first start to the end, waits included)")
    lines += _accuracy_lines(accuracy, kind)
    if (test := result.test) and test.top1 is not None:
        lines += [
            f"test top-1           {test.top1:.2f} %",
            f"test top-5           {test.top5:.2f} %  ({test.images} {kind}, each once, with the last weights)",
        ]
    estimated = f" (estimated {estimate_bytes / GIB:.2f})" if estimate_bytes else ""
    return [*lines, f"peak memory          {peak_bytes / GIB:.2f} GiB per worker{estimated}"]


def _accuracy_lines(accuracy: Accuracy, kind: str) -> list[str]:
    if accuracy.top1 is not None:
        return [
            f"top-1                {accuracy.top1:.2f} %",
            f"top-5                {accuracy.top5:.2f} %  ({accuracy.images} {kind}, each once)",
        ]
    if accuracy.images:
        return [f"validation loss      {accuracy.loss:.4f}  ({accuracy.images} {kind}, each once)"]
    return [f"data                 {kind}: nothing to evaluate"]
