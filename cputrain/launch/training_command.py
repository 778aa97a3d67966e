"""Commands of a launch that are trainings of ours."""

from itertools import pairwise
from pathlib import PurePath

TRAINER = ("cputrain", "train")


def is_training(command: tuple[str, ...]) -> bool:
    """Whether a command is `cputrain train`, or `python -m cputrain train`."""
    return training_arguments(command) is not None


def training_arguments(command: tuple[str, ...]) -> tuple[str, ...] | None:
    """The arguments of `cputrain train` where a command is that, or `python -m cputrain train`."""
    pairs = list(pairwise(PurePath(word).name for word in command))
    return command[pairs.index(TRAINER) + 2 :] if TRAINER in pairs else None
