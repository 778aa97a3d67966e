"""What a recipe's data.path holds, whichever form it has."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cputrain.data import folder
from cputrain.data.manifest import MANIFEST, read_manifest
from cputrain.data.shards import Shards
from cputrain.data.survey import data_root


class Images(Protocol):
    """A split: encoded images by number, with their labels."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Label of each image, shape (n,)."""

    def __len__(self) -> int: ...

    def read(self, i: int) -> bytes:
        """Image i as it is stored; OSError when it cannot be read."""

    def name(self, i: int) -> str:
        """Where image i is, for messages."""


class ImageFolder:
    """One split of an image folder."""

    def __init__(self, root: Path, split: str, classes: tuple[str, ...]) -> None:
        self.paths, labels = folder.list_images(root, split, classes)
        self._labels = np.array(labels, dtype=np.int64)

    @property
    def labels(self) -> NDArray[np.int64]:
        """Label of each image, shape (n,)."""
        return self._labels

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, i: int) -> bytes:
        """The file's bytes."""
        return Path(self.paths[i]).read_bytes()

    def name(self, i: int) -> str:
        """The file's path."""
        return self.paths[i]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Training and validation images that share their classes."""

    classes: tuple[str, ...]
    train: Images
    val: Images


def open_dataset(path: str | None) -> Dataset:
    """Open a prepared folder or an image folder. Raises InputError that names what is missing or wrong."""
    root = data_root(path)
    if (root / MANIFEST).is_file():
        classes = tuple(read_manifest(root)["classes"])
        return Dataset(classes=classes, train=Shards(root, "train"), val=Shards(root, "val"))
    classes = folder.class_names(root)
    train, val = (ImageFolder(root, split, classes) for split in folder.SPLITS)
    return Dataset(classes=classes, train=train, val=val)
