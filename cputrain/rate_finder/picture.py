"""The picture of a range test."""

import math

from matplotlib import pyplot as plt

from cputrain.rate_finder.curve import RangeTest, Suggestion
from cputrain.report.figure import figure_svg


def range_test_svg(title: str, test: RangeTest, suggestion: Suggestion) -> str:
    """SVG: the loss of each step and its moving average over the rate, and the suggested rate."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    points = [(rate, loss) for rate, loss in zip(test.rates, test.losses, strict=True) if math.isfinite(loss)]
    smoothed = [(rate, loss) for rate, loss in zip(test.rates, test.smoothed, strict=True) if math.isfinite(loss)]
    axes.plot(*zip(*points, strict=True), ".", color="0.7", label="loss of a step")
    axes.plot(*zip(*smoothed, strict=True), color="C0", label="moving average")
    if suggestion.rate is not None:
        axes.axvline(suggestion.rate, color="C3", linestyle="--", label=f"suggested: {suggestion.rate:.3g}")
    axes.set_xscale("log")
    first = smoothed[0][1]
    axes.set_ylim(top=max(1.3 * first, 1.05 * max(loss for _, loss in smoothed[: max(2, len(smoothed) // 2)])))
    axes.set(xlabel="learning rate", ylabel="training loss", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure_svg(figure)
