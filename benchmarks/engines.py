"""Engines, precisions, workers, allocators and OpenMP runtimes on this machine: relative images/s in one run.

    python -m benchmarks.engines [--rounds 3] [--steps 6] [--batch 16] [--side 224]
        [--ipex-python PYTHON] [--only WORD ...]

Each row trains ResNet-50 on generated images with `cputrain train`, with 1 worker on all cores and with 1 worker per
core, at the same global batch. Rounds are interleaved; a row's figure is the median over rounds of its median step,
without the first step. Rows that this machine cannot run are listed with the reason. ipex is measured with the given
Python, whose torch is 2.8; its row "native, torch 2.8" separates engine from release. --only selects rows whose names
contain one of the words.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.train_throughput import median_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A way to train: settings of the recipe, and the Python that trains."""

    name: str
    settings: tuple[str, ...]
    python: str = sys.executable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16, help="images per core")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--ipex-python", help="Python with cputrain[ipex]")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    rows = [row for row in rows_of(cores, options.ipex_python) if any(word in row.name for word in options.only)]
    rates: dict[str, list[float]] = {row.name: [] for row in rows}
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for i in range(options.rounds):
            for number, row in enumerate(rows):
                if row.name in refused:
                    continue
                found = trained(row, Path(scratch) / f"{number}-{i}", cores, options)
                if isinstance(found, str):
                    refused[row.name] = found
                    continue
                rates[row.name].append(found)
                print(f"round {i + 1}/{options.rounds}  {found:6.2f} img/s  {row.name}", file=sys.stderr, flush=True)
    show([row for row in rows if row.name not in refused], rates, options)
    for name, why in refused.items():
        print(f"not measured: {name}: {why}")


def rows_of(cores: int, ipex_python: str | None) -> list[Row]:
    """Return the rows; the others are compared with the first one."""
    layouts = {f"{cores} x 1": cores, f"1 x {cores}": 1} if cores > 1 else {"1 x 1": 1}
    rows = [
        Row(
            name=f"{engine}, {precision}, {layout}",
            settings=(f"engine={engine}", f"precision={precision}", f"plan.ppn={workers}"),
        )
        for precision in ("float32", "bf16")
        for engine in ("native", "eager", "compile")
        for layout, workers in layouts.items()
    ]
    if ipex_python:
        rows += [
            Row(
                name=f"{engine}, torch 2.8, {precision}, {layout}",
                settings=(f"engine={engine}", f"precision={precision}", f"plan.ppn={workers}"),
                python=ipex_python,
            )
            for precision in ("float32", "bf16")
            for engine in ("ipex", "native")
            for layout, workers in layouts.items()
        ]
    parts = {"allocator": ("glibc", "tcmalloc", "jemalloc"), "openmp": ("libgomp", "libiomp5")}
    rows += [
        Row(
            name=f"native, float32, {layout}, {value}",
            settings=("engine=native", "precision=float32", f"plan.ppn={workers}", f"plan.{part}={value}"),
        )
        for part, values in parts.items()
        for value in values
        for layout, workers in layouts.items()
    ]
    return rows


def trained(row: Row, run: Path, cores: int, options: argparse.Namespace) -> float | str:
    """Return images/s of the median step without the first, from event times; or the reason why it cannot train."""
    workers = next(int(value) for key, _, value in (s.partition("=") for s in row.settings) if key == "plan.ppn")
    settings = (
        *("data.path=synthetic", f"data.crop={options.side}", f"batch.local={options.batch * cores // workers}"),
        *(f"max_steps={options.steps}", f"output={run}", *row.settings),
    )
    argv = [row.python, "-m", "cputrain", "train", "imagefolder", *settings]
    result = subprocess.run(
        argv,
        check=False,
        capture_output=True,
        encoding="utf-8",
    )
    if result.returncode == 2:
        return (result.stderr.strip().splitlines() or ["no message"])[-1].removeprefix("cputrain: ")
    if result.returncode:
        sys.exit(f"{argv} failed:\n{result.stderr}")
    return options.batch * cores / median_step_s(run)


def show(rows: list[Row], rates: dict[str, list[float]], options: argparse.Namespace) -> None:
    medians = {row.name: median(rates[row.name]) for row in rows}
    first = rows[0].name
    sizes = f"{options.side} x {options.side}, {options.batch} images a core"
    print(f"| training ResNet-50, {sizes} | img/s (range) | to {first} |\n|---|---|---|")
    for name, value in medians.items():
        spread = f"{value:.2f} ({min(rates[name]):.2f}-{max(rates[name]):.2f})"
        print(f"| {name} | {spread} | {value / medians[first]:.2f} |")


if __name__ == "__main__":
    main()
