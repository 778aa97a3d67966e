"""The lab's results as a table: a row for each topology and kernel, a column for each check."""

from collections.abc import Mapping

MARKS = {None: "-", "": "yes"}  # what a check that has nothing to look at, and one that holds, are written as
Results = Mapping[tuple[str, str], Mapping[str, str | None]]


def merged(documented: str, found: str) -> str:
    """The documented table with the found rows, in place of those of the same topology and kernel."""
    old, new = ({_case(line): line for line in text.splitlines()} for text in (documented, found))
    return "".join(f"{line}\n" for line in {**old, **new}.values())


def _case(row: str) -> tuple[str, ...]:
    return tuple(row.split("|")[1:3])


def table(results: Results) -> str:
    """Markdown; `results` are each guest's problems by check."""
    checks = list(dict.fromkeys(name for problems in results.values() for name in problems))
    rows = [
        [topology, kernel, *(MARKS.get(problems.get(check), "NO") for check in checks)]
        for (topology, kernel), problems in results.items()
    ]
    lines = [["topology", "kernel", *checks], ["---"] * (2 + len(checks)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
