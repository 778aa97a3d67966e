"""Data sets with random access to images and labels: read from files, given by the user, or generated.

Generated data depends only on its seed, so it is the same on every worker.
"""

import os
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import plural
from cputrain.data.order import Indices, epoch_order

NUMBERS = re.compile(r"[\d,]+")  # sizes and offsets differ between files with the same cause
CAUSES = 3  # listed in one line

Collate = Callable[[list[Any]], tuple[Any, Any]]
"""Pairs of input and target -> the inputs and the targets of a batch."""

DISTINCT = 64  # images of random pixels; all others repeat them
SLOPE, INTERCEPT, NOISE, MAX_X = 2.0, 1.0, 0.5, 10.0


def summarize_corrupt(damaged: Sequence[str]) -> str:
    """Summarize damaged images: "cannot identify image file (11, first a.jpg), image file is truncated (b.jpg)".

    `damaged` has lines "NAME: CAUSE". Images with the same cause are counted together, the most frequent cause first.
    """
    by_cause: dict[str, list[tuple[str, str]]] = {}
    for line in damaged:
        name, _, cause = line.partition(": ")
        by_cause.setdefault(NUMBERS.sub("", cause), []).append((name, cause))
    groups = sorted(by_cause.values(), key=lambda group: -len(group))
    texts = [
        f"{group[0][1]} ({group[0][0]})" if len(group) == 1 else f"{group[0][1]} ({len(group):,}, first {group[0][0]})"
        for group in groups[:CAUSES]
    ]
    more = f", {plural(len(groups) - CAUSES, 'other cause')}" if len(groups) > CAUSES else ""
    return f"{', '.join(texts)}{more}"


def allowed_damage(images: int, fraction: float) -> int:
    """Return how many images of a split may be damaged with data.max_damaged=`fraction`: at least one, unless 0."""
    return max(1, int(fraction * images)) if fraction else 0


def is_too_damaged(damaged: float, images: int, fraction: float) -> bool:
    """Return whether `damaged` images are more than a split of `images` images may have."""
    return damaged > allowed_damage(images, fraction)


def too_many_corrupt_error(split: str, damaged: Sequence[str], read: int, images: int, fraction: float) -> InputError:
    """Return the error for a split of `images` images, of which `read` were read; `damaged` names the damaged ones."""
    return InputError(
        f"{split} split has {plural(len(damaged), 'damaged image')} among {read:,} of {images:,}: "
        f"{summarize_corrupt(damaged)}; data.max_damaged={fraction:g} allows {allowed_damage(images, fraction):,}; "
        "repair or remove them, or raise it"
    )


class Images(Protocol):
    """Split with random access to encoded images and their labels. Several threads may read it at the same time."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image, shape (n,)."""

    def __len__(self) -> int: ...

    def read(self, i: int) -> bytes:
        """Return image i as stored. Raises OSError if it cannot be read."""

    def size(self, i: int) -> int:
        """Return the bytes of image i, or an estimate if they are not known without reading it."""

    def name(self, i: int) -> str:
        """Return where image i is stored, for messages."""


class PiecewiseImages(Images):
    """Images whose neighbors can be read together at less cost than one by one."""

    @property
    @abstractmethod
    def bytes_per_image(self) -> float:
        """The mean size of an image in bytes."""

    @property
    @abstractmethod
    def usual_block(self) -> int:
        """The default number of neighbors to read together; 0 reads images individually."""

    @abstractmethod
    def read(self, i: int, pieces: Any = None) -> bytes:
        """Return image i, from `pieces` in memory that contain it, or from disk. Raises OSError if that fails."""

    @abstractmethod
    def read_pieces(self, first: int, last: int) -> Any:
        """Read the images [first, last) and return them in a form for `read`. Raises OSError if that fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Training, validation and perhaps test images with the same classes; a label is an index into `classes`.

    `notes` are lines to show to the user, such as where the validation images are from.
    """

    classes: tuple[str, ...]
    train: Images
    val: Images
    test: Images | None = None
    notes: tuple[str, ...] = ()

    @property
    def splits(self) -> dict[str, Images]:
        """The splits that exist, by name."""
        return {"train": self.train, "val": self.val} | ({} if self.test is None else {"test": self.test})


def check_labels(dataset: Dataset) -> None:
    """Raise InputError if a label of any split is not the number of a class."""
    for split, images in dataset.splits.items():
        labels = images.labels
        wrong = np.flatnonzero((labels < 0) | (labels >= len(dataset.classes)))
        if len(wrong):
            wrong_label = f"{images.name(int(wrong[0]))} of the {split} split has label {labels[wrong[0]]}"
            raise InputError(f"{wrong_label}, but there are {len(dataset.classes)} classes: prepare again")


class LabeledImages:
    """Base of splits that keep their labels in memory."""

    _labels: NDArray[np.int64]

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image, shape (n,)."""
        return self._labels

    def __len__(self) -> int:
        return len(self._labels)


class ImageFiles(LabeledImages):
    """Images in files of their own."""

    def __init__(self, paths: Sequence[str], labels: Sequence[int]) -> None:
        self._paths = paths
        self._labels = np.array(labels, dtype=np.int64)

    def read(self, i: int) -> bytes:
        """Return the file's bytes."""
        return Path(self._paths[i]).read_bytes()

    def size(self, i: int) -> int:
        """Return the file's size in bytes; 0 if it no longer exists."""
        try:
            return Path(self._paths[i]).stat().st_size
        except OSError:
            return 0

    def name(self, i: int) -> str:
        """Return the file's path."""
        return self._paths[i]


class FileParts(LabeledImages):
    """Images stored as parts of uncompressed files, such as members of tar files."""

    def __init__(self, paths: Sequence[Path], positions: ArrayLike, labels: ArrayLike, names: Sequence[str]) -> None:
        """`positions`, shape (n, 3), has each image's file (an index into `paths`), its offset and length in bytes."""
        self.paths, self._names = paths, names
        self._files = [path.open("rb") for path in paths]
        self._places = np.array(positions, dtype=np.int64).reshape(-1, 3)
        self._labels = np.array(labels, dtype=np.int64)

    def read(self, i: int) -> bytes:
        """Return the part's bytes. Raises OSError if the file ends before the part does."""
        file, offset, length = self._places[i].tolist()
        data = os.pread(self._files[file].fileno(), length, offset)
        if len(data) < length:
            raise OSError(f"{self.paths[file]} ends within the image")
        return data

    def size(self, i: int) -> int:
        """Return the part's length in bytes."""
        return int(self._places[i, 2])

    def name(self, i: int) -> str:
        """Return the file's path and the part's name."""
        return f"{self.paths[int(self._places[i, 0])]}:{self._names[i]}"


class Subset:
    """Subset of the images of a split."""

    def __init__(self, images: Images, indices: Indices) -> None:
        self._images, self._indices = images, indices

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image, shape (n,)."""
        return self._images.labels[self._indices]

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, i: int) -> bytes:
        """Return the encoded image, read by the whole split."""
        return self._images.read(int(self._indices[i]))

    def size(self, i: int) -> int:
        """Return the image's size in bytes, from the whole split."""
        return self._images.size(int(self._indices[i]))

    def name(self, i: int) -> str:
        """Return the image's name in the whole split."""
        return self._images.name(int(self._indices[i]))


class PiecewiseSubset(Subset, PiecewiseImages):
    """Subset of a split whose neighbors are read together; the indices are sorted."""

    def __init__(self, images: PiecewiseImages, indices: Indices) -> None:
        super().__init__(images, indices)
        self._whole = images

    @property
    def bytes_per_image(self) -> float:
        """The mean size of an image of the whole split in bytes."""
        return self._whole.bytes_per_image

    @property
    def usual_block(self) -> int:
        """The default of the whole split."""
        return self._whole.usual_block

    def read(self, i: int, pieces: Any = None) -> bytes:
        """Return the encoded image, from pieces of the whole split or from disk."""
        return self._whole.read(int(self._indices[i]), pieces)

    def read_pieces(self, first: int, last: int) -> Any:
        """Read the pieces of the whole split that contain the images [first, last)."""
        return self._whole.read_pieces(int(self._indices[first]), int(self._indices[last - 1]) + 1)


def subset_of(images: Images, indices: Indices) -> Subset:
    """Return the images with these numbers, which are sorted."""
    return PiecewiseSubset(images, indices) if isinstance(images, PiecewiseImages) else Subset(images, indices)


def split_at_random(images: Images, drawn: Mapping[str, Sequence[int]], seed: int) -> dict[str, Images]:
    """Draw the given number of images per class for each split at random; the rest is "train". All splits keep the
    order of the images."""
    order = epoch_order(len(images), seed, 0)
    labels = images.labels[order]
    parts: dict[str, list[Indices]] = {split: [] for split in ("train", *drawn)}
    for label, counts in enumerate(zip(*drawn.values(), strict=True)):
        remaining = order[labels == label]
        for split, count in zip(drawn, counts, strict=True):
            parts[split].append(remaining[:count])
            remaining = remaining[count:]
        parts["train"].append(remaining)
    return {split: subset_of(images, np.sort(np.concatenate(numbers))) for split, numbers in parts.items()}


class Unencoded:
    """Base of splits whose samples are not encoded images, and whose targets only the loss interprets."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Zeros, shape (n,)."""
        return np.zeros(len(self), dtype=np.int64)

    @abstractmethod
    def __len__(self) -> int: ...

    def read(self, i: int) -> bytes:
        """Raise OSError: a sample is not a file."""
        raise OSError(f"{self.name(i)} is not an image")

    def size(self, _i: int) -> int:
        """Return 0: the size is unknown."""
        return 0

    @abstractmethod
    def name(self, i: int) -> str:
        """Return the sample's number, for messages."""


class UserSamples(Unencoded):
    """Split of a user's data set; `collate` makes batches of its samples."""

    def __init__(self, samples: Any, collate: Collate, split: str) -> None:
        """Raises InputError if the samples cannot be read by number."""
        if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
            raise InputError(
                f"the {split} data is a {type(samples).__name__}, whose samples cannot be read by number: give an "
                "object with __len__ and __getitem__, such as a map-style torch.utils.data.Dataset"
            )
        self._samples, self._collate, self._split = samples, collate, split

    def __len__(self) -> int:
        return len(self._samples)

    def set_epoch(self, epoch: int) -> None:
        """Call the data set's set_epoch, if it has one, with the epoch that begins, counted from 0."""
        if hasattr(self._samples, "set_epoch"):
            self._samples.set_epoch(epoch)

    def collated(self, numbers: Sequence[int]) -> tuple[Any, Any]:
        """Return the inputs and targets of a batch. Raises InputError if `collate` does not return a pair."""
        batch = self._collate([self._samples[i] for i in numbers])
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise InputError(
                f"a batch of the {self._split} data is a {type(batch).__name__}, not a pair of inputs and targets: "
                "return a pair for each sample, or pass collate"
            )
        return batch[0], batch[1]

    def name(self, i: int) -> str:
        """Return the split and the sample's number."""
        return f"{self._split} sample {i}"


class SyntheticImages(LabeledImages):
    """Random pixels with random labels: image i has the pixels of image i % DISTINCT."""

    def __init__(self, count: int, classes: int, side: int, seed: int) -> None:
        rng = np.random.Generator(np.random.Philox(key=[seed, count]))
        self._labels = rng.integers(0, classes, count)
        self._pixels = rng.integers(0, 256, (min(count, DISTINCT), side, side, 3), dtype=np.uint8)

    def read(self, i: int) -> bytes:
        """Return the image's number, encoded for `decode`."""
        return i.to_bytes(8, "little")

    def size(self, _i: int) -> int:
        """Return 0: nothing is stored."""
        return 0

    def name(self, i: int) -> str:
        """Return the image's number, for messages."""
        return f"synthetic image {i}"

    def decode(self, encoded: Sequence[bytes], _crops: object, out: NDArray[np.uint8]) -> list[str | None]:
        """Copy the images' pixels to `out`, shape (n, crop, crop, 3). No image has an error."""
        crop = out.shape[1]
        for data, square in zip(encoded, out, strict=True):
            square[:] = self._pixels[int.from_bytes(data, "little") % DISTINCT, :crop, :crop]
        return [None] * len(out)


class Points(Unencoded):
    """Points (x, y) on the line y = SLOPE x + INTERCEPT with normal noise; x is between 0 and MAX_X."""

    def __init__(self, count: int, seed: int, split: int) -> None:
        rng = np.random.Generator(np.random.Philox(key=[seed, split]))
        self.x = rng.uniform(0.0, MAX_X, (count, 1)).astype(np.float32)
        self.y = (SLOPE * self.x + INTERCEPT + NOISE * rng.standard_normal((count, 1))).astype(np.float32)

    def __len__(self) -> int:
        return len(self.x)

    def name(self, i: int) -> str:
        """Return the point's number, for messages."""
        return f"point {i}"
