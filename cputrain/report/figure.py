"""Matplotlib's figures as SVG, for pages."""

import io
import re

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure


def figure_svg(figure: Figure) -> str:
    """The figure as an SVG element; the figure is closed."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    plt.close(figure)
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)
