"""The faults and what became of them as a table: tests/golden/faults.md, which docs/reliability.md shows."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.faults.fault import Fault, Seen

DOCUMENTED = Path(__file__).parents[1] / "golden/faults.md"
HEAD = "| kind | fault | the run | it says | s | steps lost |\n|---|---|---|---|---|---|"


def expected_cells(fault: Fault) -> list[str]:
    """The cells that follow from the fault alone."""
    says = " ... ".join(f"`{part}`" for part in fault.says)
    return [_cell(text) for text in (fault.kind, fault.name, fault.outcome, says)]


def row(fault: Fault, seen: Seen) -> str:
    """A fault's line."""
    lost = "-" if seen.lost is None else str(seen.lost)
    return _line([*expected_cells(fault), f"{seen.seconds:.1f}", lost])


def table(faults: Iterable[Fault], seen: Mapping[str, Seen | None], documented: str) -> str:
    """All faults in their order: those seen now, and the documented lines of those that were not tried. One that has
    led to something else now has no line."""
    before = documented_rows(documented)
    lines = []
    for fault in faults:
        found = seen.get(fault.name)
        if found is not None:
            lines.append(row(fault, found))
        elif fault.name not in seen and _cell(fault.name) in before:
            lines.append(_line(before[_cell(fault.name)]))
    return "\n".join([HEAD, *lines, ""])


def documented_rows(text: str) -> dict[str, list[str]]:
    """The cells of each line of the table, by the fault's name."""
    rows = ([cell.strip() for cell in line.split(" | ")] for line in text.splitlines()[2:])
    cells = ([row[0].removeprefix("| "), *row[1:-1], row[-1].removesuffix(" |")] for row in rows)
    return {each[1]: each for each in cells}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
