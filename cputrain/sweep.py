"""A sweep as data: which trainings, what came of each, and what that says."""

import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml

from affinity.errors import InputError
from cputrain.events import FILE, read_events
from cputrain.schema import SweepSection

SEED = "seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One training: the settings that make it what it is, as (key, value) texts in their order."""

    settings: tuple[tuple[str, str], ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """As `load_recipe` takes them."""
        return tuple(f"{key}={value}" for key, value in self.settings)

    @property
    def label(self) -> str:
        """What tells it from the others, whatever its seed: "sgd peak_rate 0.5"."""
        return " ".join(
            value if key.endswith(".name") else f"{key.rpartition('.')[2]} {value}"
            for key, value in self.settings
            if key != SEED
        )

    @property
    def folder(self) -> str:
        """A file name of its own."""
        return re.sub(r"[^\w.=,+-]+", "_", ",".join(self.arguments)) or "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a training: accuracies in percent after each evaluated epoch, None where there are none."""

    label: str
    run: str
    settings: tuple[tuple[str, str], ...]
    status: str
    epochs: tuple[int, ...] = ()
    top1s: tuple[float, ...] = ()
    top1: float | None = None
    top5: float | None = None
    images_per_s: float | None = None
    seconds: float | None = None
    val_loss: float | None = None
    data: str = "images"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Trainings that differ by their seeds alone."""

    label: str
    results: tuple[Result, ...]

    @property
    def top1s(self) -> tuple[float, ...]:
        """Final top-1 of those that ended well."""
        return tuple(result.top1 for result in self.results if result.top1 is not None)


def variants(section: SweepSection, grids: Sequence[str], runs: Sequence[str]) -> tuple[Variant, ...]:
    """Every run's settings with every combination of the grid, the command line's instead of the recipe's.

    `grids` are key=a,b,c; `runs` are key=value texts with blanks between. Raises InputError where there are none.
    """
    grid = {key: tuple(map(_text, values)) for key, values in section.grid.items()}
    if grids or runs:
        grid = dict(_parse_grid(text) for text in grids)
    together = [_parse_run(text) for text in (runs if grids or runs else section.runs)] or [()]
    made = tuple(
        Variant(settings=(*run, *zip(grid, values, strict=True)))
        for run in together
        for values in itertools.product(*grid.values())
    )
    if made == (Variant(settings=()),):
        raise InputError(
            "nothing to sweep over: give --grid KEY=A,B,C or --run 'KEY=VALUE ...', or a recipe with a sweep"
        )
    twice = [one.folder for one in made if sum(other.folder == one.folder for other in made) > 1]
    if twice:
        raise InputError(f"the sweep has {twice[0]} twice: leave one out")
    return made


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(yaml.safe_dump(value)).removesuffix("...\n").strip()


def _parse_grid(text: str) -> tuple[str, tuple[str, ...]]:
    key, equals, values = text.partition("=")
    if not equals or not key or not all(values.split(",")):
        raise InputError(f"--grid {text!r} is not KEY=A,B,C, as in batch.local=32,64")
    return key, tuple(values.split(","))


def _parse_run(text: str) -> tuple[tuple[str, str], ...]:
    settings = []
    for setting in shlex.split(text):
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise InputError(f"run {text!r}: {setting!r} is not KEY=VALUE, as in 'optim.name=adam epochs=3'")
        settings.append((key, value))
    return tuple(settings)


def result_of(variant: Variant, folder: Path, status: int) -> Result:
    """What a training left in its folder; `status` is its exit status."""
    events = read_events(folder) if (folder / FILE).is_file() else []
    epochs = [event for event in events if event["event"] == "epoch"]
    judged = [event for event in epochs if event["val_top1"] is not None]
    start = next((event for event in events if event["event"] == "start"), {})
    end = next((event for event in reversed(events) if event["event"] == "end"), None)
    done = end is not None and end["status"] == "done"
    return Result(
        label=variant.label,
        run=str(folder),
        settings=variant.settings,
        status="done" if done else "stopped" if status == 0 else f"failed with status {status}",
        epochs=tuple(event["epoch"] for event in judged),
        top1s=tuple(event["val_top1"] for event in judged),
        top1=end["top1"] if done and end else None,
        top5=end["top5"] if done and end else None,
        images_per_s=median(event["images_per_s"] for event in epochs) if epochs else None,
        seconds=end["time_to_train_s"] if end else None,
        val_loss=end.get("val_loss") if done and end else None,
        data=start.get("data", "images"),
    )


def grouped(results: Iterable[Result]) -> tuple[Group, ...]:
    """Results by label, in the order of the first of each."""
    by_label: dict[str, list[Result]] = {}
    for result in results:
        by_label.setdefault(result.label, []).append(result)
    return tuple(Group(label=label, results=tuple(each)) for label, each in by_label.items())


def table(groups: Sequence[Group]) -> str:
    """One line a group: top-1 as mean and range over its seeds, img/s, seconds, and what failed or is not real data.

    Without classes the validation loss is there in place of top-1.
    """
    regression = any(result.data == "points" for group in groups for result in group.results)
    head = ("training", "val loss" if regression else "top-1 %", "best epoch %", "img/s", "s", "")
    rows = [head]
    for group in groups:
        ended = [result for result in group.results if result.status == "done"]
        failed = [result.status for result in group.results if result.status != "done"]
        losses = [result.val_loss for result in ended if result.val_loss is not None]
        generated = {result.data for result in ended} & {"synthetic data"}
        best = [max(result.top1s) for result in ended if result.top1s]
        rows.append(
            (
                group.label,
                spread(losses, 4) if regression else spread(group.top1s),
                spread(best),
                _mean(result.images_per_s for result in ended),
                _mean(result.seconds for result in ended),
                f"{len(failed)} {failed[0]}" if failed else "".join(generated),
            )
        )
    return columns(rows)


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{mean(known):,.0f}" if known else ""


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned text, the first row their heads."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """The first cell to the left, the others to the right."""
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean, and the range where there are several values: "98.41 (98.30-98.52)"."""
    if not values:
        return ""
    several = f" ({min(values):.{digits}f}-{max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{several}"
