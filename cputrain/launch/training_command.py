"""`cputrain train` as the command of a job: written, and recognized."""

from itertools import pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from affinity.start import own_program

if TYPE_CHECKING:
    from cputrain.recipe.schema import Recipe

TRAINER = ("cputrain", "train")


def is_training(command: tuple[str, ...]) -> bool:
    """Whether a command is `cputrain train`, or `python -m cputrain train`."""
    return training_arguments(command) is not None


def training_arguments(command: tuple[str, ...]) -> tuple[str, ...] | None:
    """The arguments of `cputrain train` where a command is that, or `python -m cputrain train`."""
    pairs = list(pairwise(PurePath(word).name for word in command))
    return command[pairs.index(TRAINER) + 2 :] if TRAINER in pairs else None


def training_command(name: str, settings: tuple[str, ...], here: "Recipe | None") -> tuple[str, ...]:
    """The command that trains a recipe, by its file or name; `here`, the recipe itself, where this machine will train:
    it finds recipe and data from any folder."""
    command = (*own_program("cputrain"), "train")
    if here is None:
        return (*command, name, *settings)
    from cputrain.recipe.loading import input_settings  # pydantic: only where there is a recipe

    paths = input_settings(here)
    replaced = {setting.partition("=")[0] for setting in paths}
    kept = (setting for setting in settings if setting.partition("=")[0] not in replaced)
    return (*command, str(Path(name).absolute()) if Path(name).is_file() else name, *kept, *paths)
