"""Events -> curves as SVG."""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

Points = tuple[Sequence[float], Sequence[float]]


def training_curves(events: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Title -> SVG of loss, accuracy, learning rate and throughput over epochs."""
    steps = [e for e in events if e["event"] == "step"]
    epochs = [e for e in events if e["event"] == "epoch"]
    evaluated = [e for e in epochs if e["val_top1"] is not None]
    at = [e["epoch"] for e in steps]
    return {
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


def _over(events: Sequence[dict[str, Any]], key: str) -> Points:
    return [e["epoch"] for e in events], [e[key] for e in events]


def _chart(lines: dict[str, Points], unit: str) -> str:
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for label, (x, y) in lines.items():
        many = len(x) > 40
        axes.plot(x, y, label=label, linewidth=0.8 if many else 1.6, alpha=0.5 if many and len(lines) > 1 else 1.0)
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
