"""Accuracy with and without bfloat16 or Winograd's algorithm: trainings on digits and MNIST with the same seeds.

    python -m benchmarks.accuracy {bf16,winograd,both} [--mnist DIR] [--seeds 3] [--only WORD] [KEY=VALUE ...]

The digits are the demo's training. With --mnist, a folder of MNIST's four idx files, two trainings of
`cputrain reproduce large-batch` follow: the baseline, and LARS at 64 times its batch. Runs with the same seed start
from the same weights and read images in the same order. A change passes if the mean of its differences is no larger
than the range of the seeds without it; otherwise the exit status is 1. KEY=VALUE sets a key of all recipes. bf16 is
slow, but not wrong, on processors without instructions for it. Needs two cores.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from cputrain.runs.events import read_events

DIRECT = ("precision=float32", "model.winograd=off")
CHANGES = {
    "bf16": ("precision=bf16", "model.winograd=off"),
    "winograd": ("precision=float32", "model.winograd=auto"),
    "both": ("precision=bf16", "model.winograd=auto"),
}
LARS_4096 = ("batch.local=2048", "optim.name=lars", "schedule.peak_rate=10.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A training: recipe, settings and prepared data."""

    name: str
    recipe: str
    data: Path
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Top-1 in percent of each seed, in the same order without and with the change."""

    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def allowed(self) -> float:
        """Range of the seeds without the change."""
        return max(self.before) - min(self.before)

    @property
    def difference(self) -> float:
        """Mean over the seeds of top-1 with the change minus top-1 without it, in points."""
        return mean(b - a for a, b in zip(self.before, self.after, strict=True))

    @property
    def is_within(self) -> bool:
        """Whether the change makes no larger a difference than the seed does."""
        return abs(self.difference) <= self.allowed + 1e-9  # top-1 is a quotient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("change", choices=CHANGES)
    parser.add_argument("--mnist", type=Path, help="folder with MNIST's idx files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", action="append", metavar="WORD", help="only studies whose names contain WORD")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.seeds < 2:
        sys.exit("--seeds: one seed has no range; set it to 2 or more")
    with tempfile.TemporaryDirectory() as scratch:
        results = {
            study.name: trained(study, Path(scratch), options.seeds, options.change, options.settings)
            for study in studies(Path(scratch), options.mnist)
            if any(word in study.name for word in options.only or [""])
        }
    show(options.change, results)
    sys.exit(0 if all(result.is_within for result in results.values()) else 1)


def studies(scratch: Path, mnist: Path | None) -> Iterator[Study]:
    """Yield the trainings, each after preparing its data."""
    digits = scratch / "digits"
    start("prepare", "digits", scratch / "digits-folder", digits)
    yield Study(name="digits, ResNet-50, 64 x 64, momentum, batch 32", recipe="demo-digits", data=digits)
    if mnist is not None:
        shards = scratch / "mnist"
        start("prepare", "mnist", mnist, shards)
        yield Study(name="MNIST, LeNet, momentum, batch 64", recipe="large-batch-mnist", data=shards)
        yield Study(name="MNIST, LeNet, LARS, batch 4,096", recipe="large-batch-mnist", data=shards, settings=LARS_4096)


def trained(study: Study, scratch: Path, seeds: int, change: str, settings: Sequence[str]) -> Result:
    """Train each seed without and with the change, alternating."""
    found: dict[tuple[str, ...], list[float]] = {DIRECT: [], CHANGES[change]: []}
    for seed in range(1, seeds + 1):
        for own, top1 in found.items():
            run = scratch / "run"
            places = (f"data.path={study.data}", f"output={run}", f"seed={seed}", "plan.ppn=2")
            start("train", study.recipe, *places, *own, *study.settings, *settings, "--quiet", "--overwrite")
            top1.append(next(event["top1"] for event in read_events(run) if event["event"] == "end"))
            print(f"{study.name}: seed {seed}, {' '.join(own)}: {top1[-1]:.2f} %", file=sys.stderr, flush=True)
    return Result(before=tuple(found[DIRECT]), after=tuple(found[CHANGES[change]]))


def show(change: str, results: dict[str, Result]) -> None:
    """Print the table."""
    print(
        f"| top-1 in percent, mean (range of seeds) | float32 | {change} | difference of each seed | mean | at most |"
    )
    print("|---|---|---|---|---|---|")
    for name, result in results.items():
        pairs = zip(result.before, result.after, strict=True)
        each = ", ".join(f"{b - a:+.2f}" for a, b in pairs)
        verdict = f"{result.allowed:.2f}" + ("" if result.is_within else " (exceeded)")
        columns = (name, spread(result.before), spread(result.after), each, f"{result.difference:+.2f}", verdict)
        print(f"| {' | '.join(columns)} |")


def spread(values: tuple[float, ...]) -> str:
    return f"{mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def start(*arguments: object) -> None:
    """Run a command of cputrain; a failure ends the benchmark."""
    argv = [sys.executable, "-m", "cputrain", *map(str, arguments)]
    result = subprocess.run(
        argv,
        check=False,
        capture_output=True,
        encoding="utf-8",
    )
    if result.returncode:
        sys.exit(f"{argv} failed:\n{result.stdout[-2000:]}\n{result.stderr}")


if __name__ == "__main__":
    main()
