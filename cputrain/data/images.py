"""Encoded images by number, wherever they lie: what preparing reads, and training too."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from affinity.errors import InputError
from cputrain.data.order import Order, epoch_order


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
    """Training, validation and, where a data set has them, test images that share their classes."""

    classes: tuple[str, ...]
    train: Images
    val: Images
    test: Images | None = None

    @property
    def splits(self) -> dict[str, Images]:
        """The splits that there are, by name."""
        return {"train": self.train, "val": self.val} | ({} if self.test is None else {"test": self.test})


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


def split_off(classes: tuple[str, ...], images: Images, fractions: Mapping[str, float], seed: int) -> Dataset:
    """Draw "val", or "val" and "test", out of the images by the seed: `fractions` of all of them, rounded, and of each
    class at least one image and as nearly as that total allows.

    Raises InputError where a class is too small to be cut.
    """
    order = epoch_order(len(images), seed, 0)
    labels = images.labels[order]
    members = [order[labels == label] for label in range(len(classes))]
    sizes = [len(each) for each in members]
    drawn = {split: apportioned(fraction, sizes) for split, fraction in fractions.items()}
    parts: dict[str, list[Order]] = {split: [] for split in ("train", *fractions)}
    for name, rest, *counts in zip(classes, members, *drawn.values(), strict=True):
        if sum(counts) >= len(rest):
            asked = " and ".join(f"{fraction:g}" for fraction in fractions.values())
            raise InputError(f"class {name} has {len(rest)} image(s): too few to split off {asked} of them")
        left = rest
        for split, count in zip(fractions, counts, strict=True):
            parts[split].append(left[:count])
            left = left[count:]
        parts["train"].append(left)
    made = {split: Part(images, np.sort(np.concatenate(each))) for split, each in parts.items()}
    return Dataset(classes=classes, train=made["train"], val=made["val"], test=made.get("test"))


def apportioned(fraction: float, sizes: Sequence[int]) -> list[int]:
    """How many of each class make up that fraction of all, rounded: largest remainders (Hamilton), at least 1 each."""
    exact = [fraction * size for size in sizes]
    counts = [max(1, int(share)) for share in exact]
    missing = round(fraction * sum(sizes)) - sum(counts)
    by_remainder = sorted(range(len(sizes)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: max(0, missing)]:
        counts[i] += 1
    return counts
