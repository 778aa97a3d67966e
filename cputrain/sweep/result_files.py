"""The files of a sweep's results."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cputrain.files import write_atomic
from cputrain.sweep.results import Result, grouped
from cputrain.sweep.tables import csv_rows, csv_text, markdown, markdown_rows
from cputrain.sweep.workers import FEWEST, RULE, compare, comparison_rows

RESULTS, PICTURE, CSV, MARKDOWN = "sweep.json", "sweep.svg", "sweep.csv", "sweep.md"
COMPARISON = "workers"


def write_results(folder: Path, name: str, results: Sequence[Result]) -> None:
    """sweep.json and .csv for machines, sweep.md and .svg for people; workers.* where worker counts differ."""
    from cputrain.report.sweep_pictures import sweep_picture, workers_picture  # matplotlib: a second, at the end only

    groups = grouped(results)
    text = json.dumps({"recipe": name, "runs": [asdict(result) for result in results]}, indent=1)
    write_atomic(folder / RESULTS, text.encode())
    write_atomic(folder / CSV, csv_text(results).encode())
    write_atomic(folder / MARKDOWN, f"# {name}\n\n{markdown(groups)}\n![curves]({PICTURE})\n".encode())
    write_atomic(folder / PICTURE, sweep_picture(name, groups).encode())
    compared = compare(results)
    if compared:
        rows, picture = comparison_rows(compared), f"{COMPARISON}.svg"
        told = {"recipe": name, "rule": RULE, "trainings": [asdict(one) for one in compared]}
        notes = f"{RULE}; {FEWEST}"
        write_atomic(folder / f"{COMPARISON}.json", json.dumps(told, indent=1).encode())
        write_atomic(
            folder / f"{COMPARISON}.csv",
            csv_rows([list(asdict(compared[0])), *(list(asdict(one).values()) for one in compared)]).encode(),
        )
        write_atomic(
            folder / f"{COMPARISON}.md",
            f"# {name}: workers compared\n\n{markdown_rows(rows)}\n{notes}\n\n![curves]({picture})\n".encode(),
        )
        write_atomic(folder / picture, workers_picture(name, results, compared).encode())
