"""Every experiment of the reference documents at this machine's scale: the table of docs/documents.md.

    python -m benchmarks.documents --mnist DIR --photos DIR [--only TEXT]

Runs each row's small commands as a user would, in a separate folder, and prints the tables with the results. A row that
fails shows its last line of output, and makes the exit status 1.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

import yaml

LIMIT_S = 1200  # per command
HEADS = ("experiment", "at full size", "on two cores", "shown here", "s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An experiment of documents.yaml."""

    document: str
    experiment: str
    full: tuple[str, ...]
    small: tuple[str, ...]
    shows: tuple[str, ...]
    status: int = 0


def rows_of_documents() -> tuple[Row, ...]:
    """Return the experiments, document by document."""
    data = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

    def row(document: str, *, full: Any = (), small: Any = (), same: str | None = None, shows: Any, **rest: Any) -> Row:
        lines = [(same,), (same,)] if same is not None else [full, small]
        full, small = (tuple(Template(line).substitute(data["settings"]) for line in each) for each in lines)
        return Row(document=document, full=full, small=small, shows=tuple(shows), **rest)

    return tuple(row(each["document"], **one) for each in data["documents"] for one in each["experiments"])


def main() -> int:
    """Return exit status 0 if every row shows what it should."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.documents", description=__doc__)
    parser.add_argument("--mnist", type=Path, required=True, help="folder with MNIST's four files")
    parser.add_argument("--photos", type=Path, required=True, help="folder with train/CLASS/* and val/CLASS/*")
    parser.add_argument("--only", default="", help="only rows whose document or experiment contains this text")
    options = parser.parse_args()
    chosen = [row for row in rows_of_documents() if options.only in f"{row.document}: {row.experiment}"]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="documents-") as scratch:
        data = Path(scratch) / "data"
        prepare(data, options.mnist.resolve(), options.photos.resolve())
        for document, rows in groupby(chosen, key=lambda row: row.document):
            print(f"\n## {document}\n\n| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
            for row in rows:
                folder = Path(tempfile.mkdtemp(dir=scratch))
                (folder / "data").symlink_to(data)
                started = time.monotonic()
                good, shown = run(row, folder)
                failed += not good
                cells = (row.experiment, commands(row.full), commands(row.small), shown)
                print(f"| {' | '.join(cells)} | {time.monotonic() - started:.0f} |", flush=True)
    print(f"\n{len(chosen) - failed} of {len(chosen)} rows show what they should", file=sys.stderr)
    return int(failed > 0)


def prepare(data: Path, mnist: Path, photos: Path) -> None:
    """Prepare the data that the small commands name, with cputrain's commands."""
    data.mkdir()
    (data / "photos").symlink_to(photos)
    for out, more in (("mnist", ()), ("mnist-3-splits", ("--val-fraction", "1/6"))):
        argv = ["cputrain", "prepare", "mnist", str(mnist), str(data / out), *more]
        subprocess.run(argv, env=environment(), stdout=sys.stderr, check=True)


def run(row: Row, folder: Path) -> tuple[bool, str]:
    """Return whether the row's small commands show what they should, and the output shown or the failure."""
    output = ""
    for command in row.small:
        argv = shlex.split(command)
        done = subprocess.run(
            argv, cwd=folder, env=environment(), capture_output=True, encoding="utf-8", timeout=LIMIT_S, check=False
        )
        output += done.stdout
        if done.returncode != row.status:
            last = ["no output", *(done.stdout + done.stderr).strip().splitlines()][-1]
            return False, f"**failed**, status {done.returncode}: {cell(last)}"
    shown = []
    for pattern in row.shows:
        found = re.search(pattern, output, re.MULTILINE)
        if found is None:
            return False, f"**failed**: no {cell(pattern)} in its output"
        shown.append(" ".join(" ".join(group.split()) for group in found.groups() if group))
    return True, cell("; ".join(shown))


def environment() -> dict[str, str]:
    """Return an environment as after activating this Python's virtual environment, with rare progress updates."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"TQDM_MININTERVAL": "30", **os.environ, "PATH": path}


def commands(lines: tuple[str, ...]) -> str:
    """Format command lines for a table cell."""
    return "<br>".join(f"`{cell(line)}`" for line in lines)


def cell(text: str) -> str:
    """Escape text for a table cell."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
