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
    """SVGs of loss, accuracy, learning rate and throughput over epochs, by title; without empty ones."""
    steps = [e for e in events if e["event"] == "step"]
    epochs = [e for e in events if e["event"] == "epoch"]
    at = [e["epoch"] for e in steps]
    speed = f"{unit_of(events)}/s"
    charts: dict[tuple[str, str], dict[str, Points]] = {
        ("Loss", "loss"): {
            "step": (at, [e["loss"] for e in steps]),
            "training": _over(epochs, "train_loss"),
            "validation": _over(epochs, "val_loss"),
        },
        ("Accuracy", "percent"): {
            "training top-1": _over(epochs, "train_top1"),
            "validation top-1": _over(epochs, "val_top1"),
            "validation top-5": _over(epochs, "val_top5"),
        },
        ("Learning rate", "rate"): {"learning rate": (at, [e["rate"] for e in steps])},
        ("Throughput", speed): {speed: (at, [e["images_per_s"] for e in steps])},
    }
    drawn = {title: _chart(lines, unit) for (title, unit), lines in charts.items()}
    return {title: svg for title, svg in drawn.items() if svg is not None}


def kind_of(events: Sequence[dict[str, Any]]) -> str:
    """The kind of data of a run: images, points or synthetic data."""
    return next((e.get("data", "images") for e in reversed(events) if e["event"] == "start"), "images")


def unit_of(events: Sequence[dict[str, Any]]) -> str:
    """The word for samples of a run's data."""
    return "points" if kind_of(events) == "points" else "images"


def _over(epochs: Sequence[dict[str, Any]], key: str) -> Points:
    """The epochs with a value, and these values."""
    known = [e for e in epochs if e[key] is not None]
    return [e["epoch"] for e in known], [e[key] for e in known]


def _chart(lines: dict[str, Points], unit: str) -> str | None:
    """A chart of the lines that have values; None where no line has any."""
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
    """The figure as an SVG element; the figure is closed."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    plt.close(figure)
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)
