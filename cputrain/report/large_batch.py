"""Accuracy over batch size, as Figure 1 of You et al. 2018 has it."""

from collections.abc import Sequence
from statistics import mean

from matplotlib import pyplot as plt

from cputrain.report.curves import figure_svg
from cputrain.reproduce.large_batch import HOLDS, LOST, Cell

MARKS = {"momentum": "o", "lars": "s"}


def large_batch_picture(title: str, found: Sequence[Cell]) -> str:
    """SVG: top-1 of each optimizer over the global batch, mean and range of the seeds, and the baseline."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    base = mean(found[0].top1s)
    for below, style in ((0.0, "-"), (HOLDS, "--"), (LOST, ":")):
        label = f"baseline {base:.2f} %" if below == 0 else f"{below:g} point(s) under it"
        axes.axhline(base - below, color="gray", linewidth=0.8, linestyle=style, label=label)
    for optimizer, mark in MARKS.items():
        ended = [cell for cell in found if cell.top1s and (cell.optimizer == optimizer or cell is found[0])]
        means = [mean(cell.top1s) for cell in ended]
        low = [m - min(cell.top1s) for m, cell in zip(means, ended, strict=True)]
        high = [max(cell.top1s) - m for m, cell in zip(means, ended, strict=True)]
        name = {"momentum": "momentum, best rate", "lars": "LARS, best rate"}[optimizer]
        axes.errorbar([cell.batch for cell in ended], means, (low, high), marker=mark, capsize=3, label=name)
    axes.set_xscale("log", base=2)
    batches = sorted({cell.batch for cell in found})
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.set(xlabel="global batch, the same epochs", ylabel="top-1, percent", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower left")
    return figure_svg(figure)
