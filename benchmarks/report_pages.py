"""Report pages of a million steps, in one run and in a hundred runs: python -m benchmarks.report_pages.

Prints how long `cputrain report` takes to write each page, its size, and how long Chromium takes from opening it until
its curves are drawn (median of 3). Needs Debian's chromium and `pip install playwright`.
"""

import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

from cputrain.affinity.terminal import align_columns
from cputrain.cli import main
from tests.support.browser import opened
from tests.support.run_folders import write_run

ROUNDS = 3
HEADS = ("page", "steps", "written in s", "MB", "opened in s")


def measured(name: str, target: Path, steps: int) -> tuple[str, ...]:
    """Return a row of the table."""
    page = target / "page.html"
    begun = time.perf_counter()
    assert main(["report", str(target), "--output", str(page)]) == 0
    written = time.perf_counter() - begun
    seconds = []
    for _ in range(ROUNDS):
        with opened(page) as (_, _, opened_s):
            seconds.append(opened_s)
    return name, f"{steps:,}", f"{written:.1f}", f"{page.stat().st_size / 1e6:.2f}", f"{median(seconds):.2f}"


def rows(folder: Path) -> list[tuple[str, ...]]:
    """Return the rows of the two pages."""
    write_run(folder / "one", ranks=8, epochs=100, steps=10_000)
    for i in range(100):
        write_run(folder / f"many/run{i}", ranks=8, epochs=10, steps=1_000, seed=i)
    return [
        measured("one run", folder / "one", 1_000_000),
        measured("100 runs", folder / "many", 1_000_000),
    ]


if __name__ == "__main__":
    scratch = Path(tempfile.mkdtemp(prefix="cputrain-pages-"))
    print(align_columns([HEADS, *rows(scratch)], numbers=True))
    shutil.rmtree(scratch)
