"""What a data folder contains, by the names of its files."""

from pathlib import Path

from affinity.errors import InputError


def has_tfrecords(root: Path) -> bool:
    """Whether a folder contains TFRecords, by the names of its files."""
    return next(root.glob("train-*-of-*"), None) is not None


def data_root(path: str | None) -> Path:
    """The folder that data.path names. Raises InputError when it names none."""
    if path is None:
        raise InputError("the recipe has no data.path: set data.path=DIR to a folder of images")
    return Path(path)
