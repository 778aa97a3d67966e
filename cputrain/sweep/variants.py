"""The trainings of a sweep: every run's settings with every combination of its grid."""

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from cputrain.affinity.errors import InputError
from cputrain.recipe.schema import SweepSection

SEED, WORKERS = "seed", "plan.ppn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One training of a sweep: the settings that set it apart, as (key, value) texts in order."""

    settings: tuple[tuple[str, str], ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The settings as `load_recipe` takes them."""
        return tuple(f"{key}={value}" for key, value in self.settings)

    @property
    def label(self) -> str:
        """The settings without the seed, in short: "sgd peak_rate 0.5"."""
        return label_of(self.settings, without=(SEED,))

    @property
    def folder(self) -> str:
        """The name of its folder, different for each variant of a sweep."""
        return re.sub(r"[^\w.=,+-]+", "_", ",".join(self.arguments)) or "run"


def label_of(settings: Sequence[tuple[str, str]], *, without: Sequence[str]) -> str:
    """Settings as a short text, without the keys in `without`."""
    return " ".join(
        value if key.endswith(".name") else f"{key.rpartition('.')[2]} {value}"
        for key, value in settings
        if key not in without
    )


def variants(section: SweepSection, grids: Sequence[str], runs: Sequence[str]) -> tuple[Variant, ...]:
    """Every run's settings with every combination of the grid; those of the command line replace the recipe's.

    `grids` are "key=a,b,c"; `runs` are "key=value key=value". Raises InputError where there are none.
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
            "nothing to sweep over: give --grid KEY=A,B,C or --run 'KEY=VALUE ...', or a recipe with a sweep section"
        )
    twice = [one.folder for one in made if sum(other.folder == one.folder for other in made) > 1]
    if twice:
        raise InputError(f"the sweep has {twice[0]} twice: remove one")
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


def parse_workers(text: str) -> tuple[int, ...]:
    """ "1,2,4" -> (1, 2, 4). Raises InputError."""
    counts = text.split(",")
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        raise InputError(f"--workers {text!r} is not a list of worker counts, as in 1,2,4")
    return tuple(map(int, counts))
