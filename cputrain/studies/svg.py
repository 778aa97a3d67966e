"""Figures as SVG, by matplotlib."""

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_svg(draw: "Callable[[Axes], object]", size: tuple[float, float], **labels: Any) -> str:
    """Return a figure that `draw` draws as SVG; `labels` are axis settings."""
    drawing, axes = subplots(figsize=size)
    draw(axes)
    axes.set(**labels)
    axes.grid(alpha=0.3)
    if axes.get_legend() is None:
        axes.legend(fontsize="small")
    return figure_svg(drawing)


def subplots(*grid: int, figsize: tuple[float, float], **how: Any) -> Any:
    """Create a matplotlib figure and its axes; importing matplotlib takes a second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize, layout="constrained")
    return figure, figure.subplots(*grid, **how)


def figure_svg(figure: "Figure") -> str:
    """Return a figure as an SVG element for HTML pages."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)
