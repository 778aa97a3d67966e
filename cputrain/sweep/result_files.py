"""The files with a sweep's results."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from affinity.text_table import csv_table, markdown_table
from cputrain.files import write_text
from cputrain.sweep.results import RunResult, group_by_seed
from cputrain.sweep.tables import csv_text, markdown
from cputrain.sweep.workers import FEWEST, RULE, compare, comparison_rows

RESULTS, PICTURE, CSV, MARKDOWN = "sweep.json", "sweep.svg", "sweep.csv", "sweep.md"
COMPARISON = "workers"


def results_as_json(name: str, results: Sequence[RunResult]) -> dict[str, Any]:
    """A sweep as plain values for JSON: the recipe's name and each training's result."""
    return {"recipe": name, "runs": [asdict(result) for result in results]}


def write_results(folder: Path, name: str, results: Sequence[RunResult]) -> None:
    """sweep.json and .csv for machines, sweep.md and .svg for people; workers.* where worker counts differ."""
    from cputrain.sweep.charts import sweep_chart, workers_chart  # matplotlib: a second, at the end only

    groups = group_by_seed(results)
    write_text(folder / RESULTS, json.dumps(results_as_json(name, results), indent=1))
    write_text(folder / CSV, csv_text(results))
    write_text(folder / MARKDOWN, f"# {name}\n\n{markdown(groups)}\n![curves]({PICTURE})\n")
    write_text(folder / PICTURE, sweep_chart(name, groups))
    compared = compare(results)
    if compared:
        rows, picture = comparison_rows(compared), f"{COMPARISON}.svg"
        data = {"recipe": name, "rule": RULE, "trainings": [asdict(one) for one in compared]}
        notes = f"{RULE}; {FEWEST}"
        write_text(folder / f"{COMPARISON}.json", json.dumps(data, indent=1))
        write_text(
            folder / f"{COMPARISON}.csv",
            csv_table([list(asdict(compared[0])), *(list(asdict(one).values()) for one in compared)]),
        )
        write_text(
            folder / f"{COMPARISON}.md",
            f"# {name}: workers compared\n\n{markdown_table(rows)}\n{notes}\n\n![curves]({picture})\n",
        )
        write_text(folder / picture, workers_chart(name, results, compared))
