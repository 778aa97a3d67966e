"""Reports as SVG: a bar for each figure with its range, its limit a line, a panel for each unit and each table."""

from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from cputrain.bench.figures import Figure, Report, Table
from cputrain.report.figure import figure_svg

BAR_INCHES, MARGIN_INCHES = 0.28, 1.1


def report_svg(report: Report) -> str:
    """The figures of a report, and those tables that have a column to draw."""
    units = list(dict.fromkeys(figure.unit for figure in report.figures))
    panels = [[figure for figure in report.figures if figure.unit == unit] for unit in units]
    tables = [table for table in report.tables if table.drawn is not None]
    counts = [*map(len, panels), *(len(table.rows[: table.shown]) for table in tables)]
    heights = [BAR_INCHES * count + MARGIN_INCHES for count in counts]
    figure, axes = plt.subplots(
        len(counts), 1, figsize=(9, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for place, panel in zip(axes[:, 0], panels, strict=False):
        _draw(place, panel)
    for place, table in zip(axes[len(panels) :, 0], tables, strict=True):
        _draw_table(place, table)
    figure.suptitle(report.title, fontsize="medium")
    return figure_svg(figure)


def _draw(axes: Axes, figures: Sequence[Figure]) -> None:
    places = range(len(figures))
    values = [each.value for each in figures]
    errors = [[each.value - each.low for each in figures], [each.high - each.value for each in figures]]
    axes.barh(places, values, xerr=errors, color="C0", height=0.7, label="median and range", error_kw={"linewidth": 1})
    limits = [(each.limit, at) for at, each in enumerate(figures) if each.limit is not None]
    if limits:
        axes.vlines(
            [limit for limit, _ in limits],
            [at - 0.4 for _, at in limits],
            [at + 0.4 for _, at in limits],
            color="C3",
            linewidth=2,
            label="limit",
        )
    axes.set_yticks(places, [each.name for each in figures], fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel=figures[0].unit, xlim=(0, None))
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_table(axes: Axes, table: Table) -> None:
    """A bar for each printed row of a table."""
    rows, column = table.rows[: table.shown], table.drawn or 0
    axes.barh(range(len(rows)), [float(row[column] or 0.0) for row in rows], color="C2", height=0.7)
    axes.set_yticks(range(len(rows)), [str(row[0]) for row in rows], fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel=table.head[column], xlim=(0, None), title=table.title)
    axes.grid(alpha=0.3, axis="x")
