"""Encoded images by number, wherever they lie: what preparing reads, and training too."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from affinity.errors import InputError
from cputrain.data.order import epoch_order


class Images(Protocol):
    """A split: encoded images by number, with their labels. Safe to read from several threads."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Label of each image, shape (n,)."""

    def __len__(self) -> int: ...

    def read(self, i: int) -> bytes:
        """Image i as it is stored; OSError when it cannot be read."""

    def size(self, i: int) -> int:
        """Bytes of image i, as nearly as they are known without reading it."""

    def name(self, i: int) -> str:
        """Where image i is, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Training and validation images that share their classes."""

    classes: tuple[str, ...]
    train: Images
    val: Images


class Files:
    """Images that are files."""

    def __init__(self, paths: Sequence[str], labels: Sequence[int]) -> None:
        self._paths = paths
        self._labels = np.array(labels, dtype=np.int64)

    @property
    def labels(self) -> NDArray[np.int64]:
        """Label of each image, shape (n,)."""
        return self._labels

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, i: int) -> bytes:
        """The file's bytes."""
        return Path(self._paths[i]).read_bytes()

    def size(self, i: int) -> int:
        """The file's size; 0 where it has gone."""
        try:
            return Path(self._paths[i]).stat().st_size
        except OSError:
            return 0

    def name(self, i: int) -> str:
        """The file's path."""
        return self._paths[i]


class Spans:
    """Images that are spans of bytes in one file: members of an archive."""

    def __init__(
        self,
        path: Path,
        offset: Sequence[int],
        length: Sequence[int],
        labels: Sequence[int],
        names: Sequence[str],
    ) -> None:
        self._file = path.open("rb")
        self._offset, self._length = offset, length
        self._names = names
        self._labels = np.array(labels, dtype=np.int64)

    @property
    def labels(self) -> NDArray[np.int64]:
        """Label of each image, shape (n,)."""
        return self._labels

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, i: int) -> bytes:
        """The span's bytes. Raises OSError where the file ends before it."""
        data = os.pread(self._file.fileno(), self._length[i], self._offset[i])
        if len(data) < self._length[i]:
            raise OSError(f"{self._file.name} ends within it")
        return data

    def size(self, i: int) -> int:
        """The span's length."""
        return self._length[i]

    def name(self, i: int) -> str:
        """The member's name, after its archive's."""
        return f"{self._file.name}:{self._names[i]}"


class Part:
    """Some images of a split."""

    def __init__(self, images: Images, numbers: NDArray[np.int64]) -> None:
        self._images, self._numbers = images, numbers

    @property
    def labels(self) -> NDArray[np.int64]:
        """Label of each image, shape (n,)."""
        return self._images.labels[self._numbers]

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, i: int) -> bytes:
        """As the whole split reads it."""
        return self._images.read(int(self._numbers[i]))

    def size(self, i: int) -> int:
        """As the whole split has it."""
        return self._images.size(int(self._numbers[i]))

    def name(self, i: int) -> str:
        """As the whole split names it."""
        return self._images.name(int(self._numbers[i]))


def split_off(classes: tuple[str, ...], images: Images, fraction: float, seed: int) -> Dataset:
    """A share of each class for validation, at least one image of it; drawn by the seed, independent of the others.

    Raises InputError where a class is too small to be cut.
    """
    order = epoch_order(len(images), seed, 0)
    labels = images.labels[order]
    val = np.zeros(len(images), dtype=bool)
    for label, name in enumerate(classes):
        members = order[labels == label]
        count = max(1, round(fraction * len(members)))
        if count >= len(members):
            raise InputError(f"class {name} has {len(members)} image(s): too few to split off {fraction:g} of them")
        val[members[:count]] = True
    return Dataset(classes=classes, train=Part(images, np.flatnonzero(~val)), val=Part(images, np.flatnonzero(val)))
