"""What a resumed run may change: pure comparisons of recipes, data and workers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from affinity.wording import counted
from cputrain.recipe.derivation import TrainingSizes
from cputrain.recipe.loading import with_absolute_paths
from cputrain.recipe.schema import Recipe
from cputrain.recipe.schema.data import OWN

# Keys and sections that decide where, how fast and how long a training runs, not what it computes; for data.path and
# batch this holds while the images and the global batch stay the same, which `reason_not_to_resume` checks.
MAY_CHANGE = (
    "name",
    "data.path",
    "data.stage_dir",
    "data.decoder",
    "data.on_error",
    "data.max_damaged",
    "data.train_images",
    "data.prepare",
    "batch",
    "max_steps",
    "on_nan",
    "log_norms_every_steps",
    "compare_weights_every_steps",
    "log",
    "evaluate",
    "checkpoint",
    "comm.backend",
    "comm.timeout_s",
    "comm.bucket_mib",
    "engine",
    "plan",
    "sweep",
)
ENDLESS = ("constant", "steps")  # schedules whose rates do not depend on the last step

Differences = dict[str, tuple[Any, Any]]
"""Dotted key -> old and new value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingScale:
    """Workers, images per step, training images and classes of one start of a training."""

    workers: int
    global_batch: int
    train_images: int
    classes: int

    @classmethod
    def of(cls, sizes: TrainingSizes, *, workers: int, train_images: int, classes: Sequence[str]) -> "TrainingScale":
        """The scale of a training with these sizes."""
        return cls(workers=workers, global_batch=sizes.global_batch, train_images=train_images, classes=len(classes))

    @classmethod
    def of_start(cls, event: dict[str, Any]) -> "TrainingScale | None":
        """The scale in a start event; None where it lacks a field."""
        names = cls.__dataclass_fields__
        return cls(**{name: event[name] for name in names}) if names.keys() <= event.keys() else None

    def as_fields(self) -> dict[str, int]:
        """The fields of a start event."""
        return asdict(self)


def differences(old: Recipe, new: Recipe) -> Differences:
    """The keys in which two recipes differ; paths are compared as absolute ones, and `output` is ignored."""
    a, b = values_by_key(old), values_by_key(new)
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


def values_by_key(recipe: Recipe) -> dict[str, Any]:
    """The recipe's values by dotted key, with absolute paths and without `output`."""
    return flat(with_absolute_paths(recipe).model_dump(by_alias=True, exclude={"output"}))


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def describe_differences(found: Differences) -> str:
    """ "epochs: 2 -> 3, comm.backend: auto -> gloo"."""
    return ", ".join(f"{key}: {describe_value(old)} -> {describe_value(new)}" for key, (old, new) in found.items())


def describe_value(value: Any) -> str:
    """A key's value as a recipe has it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(describe_value, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def changes_training(found: Differences, new: Recipe) -> Differences:
    """The differences that would change what the training computes from here on."""
    endless = new.schedule.name in ENDLESS and all(phase.restart_rate is None for phase in new.phases)
    allowed = (*MAY_CHANGE, *(("epochs",) if endless else ()))
    return {key: pair for key, pair in found.items() if not any(f"{key}.".startswith(f"{each}.") for each in allowed)}


def _same_data(recipe: Recipe) -> str:
    """What makes the data of a resumed run the same again."""
    if recipe.data.path == OWN:
        return "give the same data"
    return "set data.train_images back" if recipe.data.generated else "set data.path to the same images"


def reason_not_to_resume(
    folder: Path, old: Recipe, new: Recipe, before: TrainingScale | None, now: TrainingScale
) -> str | None:
    """Why the run in a folder cannot continue with this recipe and these workers, and what to do; None where it can."""
    changed = changes_training(differences(old, new), new)
    if changed:
        return (
            f"--resume: {describe_differences(changed)} would change what the run in {folder} computes: undo that, or "
            f"start a new run from its weights: model.weights={folder}/checkpoints/best and another output"
        )
    if old.data.kind != new.data.kind:
        return (
            f"--resume: the run in {folder} was trained on {old.data.kind}, data.path={new.data.path} is "
            f"{new.data.kind}: set data.path back, or start a new run with another output"
        )
    if before is None:
        return None
    if (now.train_images, now.classes) != (before.train_images, before.classes):
        return (
            f"--resume: data.path={new.data.path} has {now.train_images:,} training {new.data.unit} of {now.classes} "
            f"classes, the run in {folder} was trained on {before.train_images:,} of {before.classes}: "
            + _same_data(new)
        )
    if now.global_batch != before.global_batch:
        return (
            f"--resume: the global batch is {now.global_batch:,} with {counted(now.workers, 'worker')}, but "
            f"{before.global_batch:,} in the run in {folder} ({counted(before.workers, 'worker')}): set "
            f"batch.global={before.global_batch}"
        )
    if new.optim.scale_rate_by == "workers" and now.workers != before.workers:
        return (
            f"--resume: optim.scale_rate_by=workers, and {counted(now.workers, 'worker')} instead of "
            f"{before.workers} would change the learning rate of the run in {folder}: start "
            f"{counted(before.workers, 'worker')} again"
        )
    return None
