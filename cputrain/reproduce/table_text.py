"""Published tables beside our recipes' sizes, as text and as Markdown."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from affinity.text_table import align_columns, markdown_table
from affinity.wording import counted
from cputrain.reproduce.tables import ExperimentComparison, quantity_text


def tables_text(rows: Iterable[ExperimentComparison]) -> str:
    """The tables of the documents, one below the other."""
    return _each_table(rows, _text)


def tables_markdown(rows: Iterable[ExperimentComparison]) -> str:
    """The tables of the documents in Markdown."""
    return _each_table(rows, _markdown)


def _each_table(
    rows: Iterable[ExperimentComparison], one_table: Callable[[str, Sequence[ExperimentComparison]], str]
) -> str:
    titled = groupby(rows, lambda row: f"{row.document}: {row.table}")
    return "\n".join(one_table(title, list(experiments)) for title, experiments in titled)


def _text(title: str, experiments: Sequence[ExperimentComparison]) -> str:
    blocks = [title]
    for one in experiments:
        rows = [("", "published", "recipe", ""), *((f"  {cell}", *rest) for cell, *rest in _cells(one))]
        note = f"\n  note: {one.note}" if one.note else ""
        blocks.append(f"{one.experiment}\n  {_recipe(one)}\n{align_columns(rows, numbers=True)}{note}")
    return "\n\n".join(blocks) + "\n"


def _markdown(title: str, experiments: Sequence[ExperimentComparison]) -> str:
    rows = [("experiment", "quantity", "published", "recipe", "")]
    rows += [(one.experiment, *cells) for one in experiments for cells in _cells(one)]
    notes = (f"- {one.experiment}: {_recipe(one)}" + (f"; {one.note}" if one.note else "") for one in experiments)
    rules = ("---", "---", "---:", "---:", "---")
    return "\n".join((f"### {title}", "", markdown_table(rows, rules=rules), *notes)) + "\n"


def _cells(one: ExperimentComparison) -> list[tuple[str, str, str, str]]:
    """Quantity, published value, the recipe's value, and "differs" where the two differ."""
    return [
        (
            row.quantity,
            quantity_text(row.quantity, row.published),
            quantity_text(row.quantity, row.recipe),
            "differs" if row.differs else "",
        )
        for row in one.rows
    ]


def _recipe(one: ExperimentComparison) -> str:
    """The recipe with its settings and workers."""
    return (
        f"recipe {one.command} on {counted(one.hosts, 'host')} x {counted(one.ppn, 'worker')}"
        if one.command
        else "no recipe"
    )
