"""The settings that `cputrain sweep` combines."""

from pydantic import Field

from cputrain.recipe.schema.base import Section


class SweepSection(Section):
    """The trainings of `cputrain sweep`: this recipe with other settings. `cputrain train` ignores the section."""

    grid: dict[str, tuple[str | int | float | bool | None, ...]] = Field(default={})
    """Values to try for each key, as in {batch.local: [32, 64]}. Every combination of the values is trained; empty: no
    grid."""
    runs: tuple[str, ...] = ()
    """Settings to use together, as in "optim.name=sgd schedule.peak_rate=0.5". Each entry is combined with every point
    of the grid; empty: the recipe's own settings."""
