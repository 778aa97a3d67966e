"""Events -> curves as SVG."""

import io
import re
from collections.abc import Sequence
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from cputrain.sweep import Group

Points = tuple[Sequence[float], Sequence[float]]


def training_curves(events: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Title -> SVG of loss, accuracy, learning rate and throughput over epochs; without those that have no value."""
    steps = [e for e in events if e["event"] == "step"]
    epochs = [e for e in events if e["event"] == "epoch"]
    evaluated = [e for e in epochs if e["val_top1"] is not None]
    at = [e["epoch"] for e in steps]
    charts = {
        "Loss": _chart(
            {
                "step": (at, [e["loss"] for e in steps]),
                "training": _over(epochs, "train_loss"),
                "validation": _over(evaluated, "val_loss"),
            },
            "loss",
        ),
        "Accuracy": _chart(
            {
                "training top-1": _over(epochs, "train_top1"),
                "validation top-1": _over(evaluated, "val_top1"),
                "validation top-5": _over(evaluated, "val_top5"),
            },
            "percent",
        ),
        "Learning rate": _chart({"learning rate": (at, [e["rate"] for e in steps])}, "rate"),
        "Throughput": _chart({"images/s": (at, [e["images_per_s"] for e in steps])}, "images/s"),
    }
    return {title: svg for title, svg in charts.items() if svg is not None}


def sweep_curves(title: str, groups: Sequence[Group]) -> str:
    """SVG of validation top-1 over epochs, one line a group: the mean of its seeds within their range."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for group in groups:
        runs = [result for result in group.results if result.top1s]
        if not runs:
            continue
        epochs = min((result.epochs for result in runs), key=len)
        columns = list(zip(*(result.top1s[: len(epochs)] for result in runs), strict=True))
        (line,) = axes.plot(epochs, [mean(column) for column in columns], marker=".", label=group.label)
        axes.fill_between(
            epochs, [min(c) for c in columns], [max(c) for c in columns], color=line.get_color(), alpha=0.2
        )
    axes.set(xlabel="epoch", ylabel="validation top-1, percent", title=title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small", loc="lower right")
    return figure_svg(figure)


def _over(events: Sequence[dict[str, Any]], key: str) -> Points:
    return [e["epoch"] for e in events], [e[key] for e in events]


def _chart(lines: dict[str, Points], unit: str) -> str | None:
    """The lines that have a value; None where none has."""
    drawn = {label: (x, y) for label, (x, y) in lines.items() if any(value is not None for value in y)}
    if not drawn:
        return None
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for label, (x, y) in drawn.items():
        many = len(x) > 40
        width, alpha = (0.8, 0.5 if len(lines) > 1 else 1.0) if many else (1.6, 1.0)
        axes.plot(x, y, label=label, linewidth=width, alpha=alpha, marker="" if many else ".")
    axes.set(xlabel="epoch", ylabel=unit)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend(fontsize="small")
    return figure_svg(figure)


def figure_svg(figure: Figure) -> str:
    """The figure as an SVG element, and closed."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    plt.close(figure)
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)
