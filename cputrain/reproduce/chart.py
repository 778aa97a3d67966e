"""Accuracy over batch size, like Figure 1 of You et al. 2018."""

from collections.abc import Sequence
from statistics import mean

from matplotlib import pyplot as plt

from cputrain.report.figure import figure_svg
from cputrain.reproduce.large_batch import HOLDS, LOSES, BatchResults

MARKS = {"momentum": "o", "lars": "s"}


def large_batch_chart(title: str, found: Sequence[BatchResults]) -> str:
    """SVG: top-1 of each optimizer over the global batch, mean and range of the seeds, and the baseline."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    base = mean(found[0].top1s)
    for below, style in ((0.0, "-"), (HOLDS, "--"), (LOSES, ":")):
        label = f"baseline {base:.2f} %" if below == 0 else f"{below:g} {'point' if below == 1 else 'points'} below it"
        axes.axhline(base - below, color="gray", linewidth=0.8, linestyle=style, label=label)
    for optimizer, mark in MARKS.items():
        finished = [entry for entry in found if entry.top1s and (entry.optimizer == optimizer or entry is found[0])]
        means = [mean(entry.top1s) for entry in finished]
        low = [m - min(entry.top1s) for m, entry in zip(means, finished, strict=True)]
        high = [max(entry.top1s) - m for m, entry in zip(means, finished, strict=True)]
        name = {"momentum": "momentum, best rate", "lars": "LARS, best rate"}[optimizer]
        axes.errorbar([entry.batch for entry in finished], means, (low, high), marker=mark, capsize=3, label=name)
    axes.set_xscale("log", base=2)
    batches = sorted({entry.batch for entry in found})
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.set(xlabel="global batch, same number of epochs", ylabel="top-1, percent", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower left")
    return figure_svg(figure)
