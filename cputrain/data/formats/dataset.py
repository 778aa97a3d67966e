"""A data set: splits of encoded images by number, and their classes."""

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from affinity.errors import InputError


class Images(Protocol):
    """A split: encoded images by number, with their labels. Threads may read it at the same time."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image, shape (n,)."""

    def __len__(self) -> int: ...

    def read(self, i: int) -> bytes:
        """Image i as it is stored. Raises OSError when it cannot be read."""

    def size(self, i: int) -> int:
        """The bytes of image i, as nearly as they are known without reading it."""

    def name(self, i: int) -> str:
        """Where image i is stored, for messages."""


class PiecewiseImages(Images):
    """Images of which neighbors can be read together, at less cost than one by one."""

    @property
    @abstractmethod
    def bytes_per_image(self) -> float:
        """The mean size of an image in bytes."""

    @property
    @abstractmethod
    def usual_block(self) -> int:
        """How many neighbors to read together unless the user requests another number; 0: read one by one."""

    @abstractmethod
    def read(self, i: int, pieces: Any = None) -> bytes:
        """Image i, from pieces in memory that contain it, or from disk. Raises OSError when it cannot be read."""

    @abstractmethod
    def read_pieces(self, first: int, last: int) -> Any:
        """The images [first, last), in a form for `read`. Raises OSError when they cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSplits:
    """What a source has: classes and training images, and perhaps validation and test images of its own; `note` as in
    `Dataset`."""

    classes: tuple[str, ...]
    train: Images
    val: Images | None = None
    test: Images | None = None
    note: str = ""

    @classmethod
    def of(cls, classes: tuple[str, ...], splits: Mapping[str, Images], note: str = "") -> "OwnSplits":
        """The splits by their names: train, perhaps val and test."""
        return cls(classes=classes, train=splits["train"], val=splits.get("val"), test=splits.get("test"), note=note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Training, validation and perhaps test images with the same classes; a label is a class's place in `classes`.

    `note` is a line that the user should see, such as where the validation images are from; "" for none.
    """

    classes: tuple[str, ...]
    train: Images
    val: Images
    test: Images | None = None
    note: str = ""

    @property
    def splits(self) -> dict[str, Images]:
        """The splits that exist, by name."""
        return {"train": self.train, "val": self.val} | ({} if self.test is None else {"test": self.test})


def check_labels(dataset: Dataset) -> None:
    """Raise InputError where a label of any split is not the number of a class."""
    for split, images in dataset.splits.items():
        labels = images.labels
        wrong = np.flatnonzero((labels < 0) | (labels >= len(dataset.classes)))
        if len(wrong):
            found = f"{images.name(int(wrong[0]))} has label {labels[wrong[0]]}"
            raise InputError(f"{split}: {found}, but there are {len(dataset.classes)} classes: prepare again")


class LabeledImages:
    """What data sets have in common that keep the labels of their images in memory."""

    _labels: NDArray[np.int64]

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image, shape (n,)."""
        return self._labels

    def __len__(self) -> int:
        return len(self._labels)


class ImageFiles(LabeledImages):
    """Images that are files."""

    def __init__(self, paths: Sequence[str], labels: Sequence[int]) -> None:
        self._paths = paths
        self._labels = np.array(labels, dtype=np.int64)

    def read(self, i: int) -> bytes:
        """The file's bytes."""
        return Path(self._paths[i]).read_bytes()

    def size(self, i: int) -> int:
        """The file's size; 0 where it does not exist any more."""
        try:
            return Path(self._paths[i]).stat().st_size
        except OSError:
            return 0

    def name(self, i: int) -> str:
        """The file's path."""
        return self._paths[i]


class ArchiveMembers(LabeledImages):
    """Images that are members of an uncompressed archive, each `length` bytes from `offset` on."""

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

    def read(self, i: int) -> bytes:
        """The member's bytes. Raises OSError where the archive ends before them."""
        data = os.pread(self._file.fileno(), self._length[i], self._offset[i])
        if len(data) < self._length[i]:
            raise OSError(f"{self._file.name} ends within it")
        return data

    def size(self, i: int) -> int:
        """The member's length."""
        return self._length[i]

    def name(self, i: int) -> str:
        """The archive's path and the member's name."""
        return f"{self._file.name}:{self._names[i]}"
