"""What `cputrain sweep` varies."""

from pydantic import Field

from cputrain.recipe.schema.base import Section


class SweepSection(Section):
    """Trainings of one recipe with other settings; `cputrain train` takes no notice of it."""

    grid: dict[str, tuple[str | int | float | bool | None, ...]] = Field(default={})
    """Key -> values, as in batch.local: [32, 64]: every combination of them is trained."""
    runs: tuple[str, ...] = ()
    """Settings that belong together, as in "optim.name=sgd schedule.peak_rate=0.5": each is combined with the grid."""
