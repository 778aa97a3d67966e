"""Data sets as the pipeline sees them: images and labels by number, read, given by the user, or generated.

Generated data is determined by its seed, the same on every worker.
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
from cputrain.affinity.wording import counted
from cputrain.data.order import Indices, epoch_order

NUMBERS = re.compile(r"[\d,]+")  # bytes and offsets differ from file to file, and the cause is one
CAUSES = 3  # that a line names


def causes(damaged: Sequence[str]) -> str:
    """ "cannot identify image file (11, first a.jpg), image file is truncated (b.jpg)".

    `damaged` are lines "NAME: CAUSE". Images of one cause are counted together, the most frequent first.
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
    more = f", {counted(len(groups) - CAUSES, 'other cause')}" if len(groups) > CAUSES else ""
    return f"{', '.join(texts)}{more}"


def allowed_damage(images: int, share: float) -> int:
    """How many of so many images may be damaged by data.max_damaged=`share`: at least one, unless the share is 0."""
    return max(1, int(share * images)) if share else 0


def is_too_damaged(damaged: float, images: int, share: float) -> bool:
    """Whether that many damaged images are more than a split of so many `images` may have."""
    return damaged > allowed_damage(images, share)


def refusal(split: str, damaged: Sequence[str], read: int, images: int, share: float) -> InputError:
    """The error about a split of `images` of which these lines are about `read` ones."""
    return InputError(
        f"{split} split: {counted(len(damaged), 'damaged image')} among {read:,} of {images:,}: {causes(damaged)}: "
        f"data.max_damaged={share:g} allows {allowed_damage(images, share):,}: repair or remove them, or raise it"
    )


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
class Dataset:
    """Training, validation and perhaps test images with the same classes; a label is a class's place in `classes`.

    `notes` are lines that the user should see, such as where the validation images are from.
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


class FileParts(LabeledImages):
    """Images that are parts of uncompressed files, such as members of tar files."""

    def __init__(self, paths: Sequence[Path], places: ArrayLike, labels: ArrayLike, names: Sequence[str]) -> None:
        """`places`, shape (n, 3), are each image's file by its place in `paths`, its offset and its length in bytes."""
        self.paths, self._names = paths, names
        self._files = [path.open("rb") for path in paths]
        self._places = np.array(places, dtype=np.int64).reshape(-1, 3)
        self._labels = np.array(labels, dtype=np.int64)

    def read(self, i: int) -> bytes:
        """The part's bytes. Raises OSError where the file ends before them."""
        file, offset, length = self._places[i].tolist()
        data = os.pread(self._files[file].fileno(), length, offset)
        if len(data) < length:
            raise OSError(f"{self.paths[file]} ends within it")
        return data

    def size(self, i: int) -> int:
        """The part's length."""
        return int(self._places[i, 2])

    def name(self, i: int) -> str:
        """The file's path and the part's name."""
        return f"{self.paths[int(self._places[i, 0])]}:{self._names[i]}"


class Subset:
    """Some of the images of a split."""

    def __init__(self, images: Images, indices: Indices) -> None:
        self._images, self._indices = images, indices

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image, shape (n,)."""
        return self._images.labels[self._indices]

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, i: int) -> bytes:
        """The encoded image, read by the whole split."""
        return self._images.read(int(self._indices[i]))

    def size(self, i: int) -> int:
        """The image's bytes, from the whole split."""
        return self._images.size(int(self._indices[i]))

    def name(self, i: int) -> str:
        """The image's name in the whole split."""
        return self._images.name(int(self._indices[i]))


class PiecewiseSubset(Subset, PiecewiseImages):
    """Some of the images of a split whose neighbors are read together; the indices are sorted."""

    def __init__(self, images: PiecewiseImages, indices: Indices) -> None:
        super().__init__(images, indices)
        self._whole = images

    @property
    def bytes_per_image(self) -> float:
        """The mean size of an image of the whole split in bytes."""
        return self._whole.bytes_per_image

    @property
    def usual_block(self) -> int:
        """That of the whole split."""
        return self._whole.usual_block

    def read(self, i: int, pieces: Any = None) -> bytes:
        """The encoded image, from pieces of the whole split or by itself."""
        return self._whole.read(int(self._indices[i]), pieces)

    def read_pieces(self, first: int, last: int) -> Any:
        """The pieces of the whole split that contain the images [first, last)."""
        return self._whole.read_pieces(int(self._indices[first]), int(self._indices[last - 1]) + 1)


def subset_of(images: Images, indices: Indices) -> Subset:
    """The images with these numbers, in sorted order."""
    return PiecewiseSubset(images, indices) if isinstance(images, PiecewiseImages) else Subset(images, indices)


def draw(images: Images, drawn: Mapping[str, Sequence[int]], seed: int) -> dict[str, Images]:
    """Draw so many images of each class for each split at random; the rest is "train". Each keeps the images' order."""
    order = epoch_order(len(images), seed, 0)
    labels = images.labels[order]
    parts: dict[str, list[Indices]] = {split: [] for split in ("train", *drawn)}
    for label, counts in enumerate(zip(*drawn.values(), strict=True)):
        rest = order[labels == label]
        for split, count in zip(drawn, counts, strict=True):
            parts[split].append(rest[:count])
            rest = rest[count:]
        parts["train"].append(rest)
    return {split: subset_of(images, np.sort(np.concatenate(each))) for split, each in parts.items()}


Collate = Callable[[list[Any]], tuple[Any, Any]]
"""Pairs of input and target -> the inputs and the targets of a batch."""


class Unencoded:
    """What splits have in common whose samples are no encoded images, and whose targets only the loss knows."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Zeros, shape (n,)."""
        return np.zeros(len(self), dtype=np.int64)

    @abstractmethod
    def __len__(self) -> int: ...

    def read(self, i: int) -> bytes:
        """Raises OSError: a sample is no file."""
        raise OSError(f"{self.name(i)} is not an image")

    def size(self, _i: int) -> int:
        """0: it is not known."""
        return 0

    @abstractmethod
    def name(self, i: int) -> str:
        """The sample's number, for messages."""


class OwnSamples(Unencoded):
    """A split of a user's data set; `collate` makes batches of its samples."""

    def __init__(self, samples: Any, collate: Collate, split: str) -> None:
        """Raises InputError where the samples cannot be read by number."""
        if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
            raise InputError(
                f"the {split} data is a {type(samples).__name__}, whose samples cannot be read by number: give an "
                "object with __len__ and __getitem__, such as a map-style torch.utils.data.Dataset"
            )
        self._samples, self._collate, self._split = samples, collate, split

    def __len__(self) -> int:
        return len(self._samples)

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set which epoch begins, from 0, if it wants to know."""
        if hasattr(self._samples, "set_epoch"):
            self._samples.set_epoch(epoch)

    def collated(self, numbers: Sequence[int]) -> tuple[Any, Any]:
        """The inputs and targets of a batch. Raises InputError where they are no pair."""
        made = self._collate([self._samples[i] for i in numbers])
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise InputError(
                f"a batch of the {self._split} data is a {type(made).__name__}, not a pair of inputs and targets: let "
                "each sample be a pair, or give collate"
            )
        return made[0], made[1]

    def name(self, i: int) -> str:
        """The split and the sample's number."""
        return f"{self._split} sample {i}"


DIFFERENT = 64  # images of random pixels; the others repeat them
SLOPE, INTERCEPT, NOISE, LARGEST_X = 2.0, 1.0, 0.5, 10.0


class SyntheticImages(LabeledImages):
    """Random pixels with random labels: image i has the pixels of image i modulo DIFFERENT."""

    def __init__(self, count: int, classes: int, side: int, seed: int) -> None:
        rng = np.random.Generator(np.random.Philox(key=[seed, count]))
        self._labels = rng.integers(0, classes, count)
        self._pixels = rng.integers(0, 256, (min(count, DIFFERENT), side, side, 3), dtype=np.uint8)

    def read(self, i: int) -> bytes:
        """The image's number, which `decode` understands."""
        return i.to_bytes(8, "little")

    def size(self, _i: int) -> int:
        """The bytes of an encoded image: none."""
        return 0

    def name(self, i: int) -> str:
        """The image's number, for messages."""
        return f"synthetic image {i}"

    def decode(self, encoded: Sequence[bytes], _crops: object, out: NDArray[np.uint8]) -> list[str | None]:
        """Copy the images' pixels to `out`, shape (n, crop, crop, 3), like a decoder that never fails."""
        crop = out.shape[1]
        for data, square in zip(encoded, out, strict=True):
            square[:] = self._pixels[int.from_bytes(data, "little") % DIFFERENT, :crop, :crop]
        return [None] * len(out)


class Points(Unencoded):
    """Points (x, y) of the line y = SLOPE x + INTERCEPT with normal noise, x between 0 and LARGEST_X."""

    def __init__(self, count: int, seed: int, split: int) -> None:
        rng = np.random.Generator(np.random.Philox(key=[seed, split]))
        self.x = rng.uniform(0.0, LARGEST_X, (count, 1)).astype(np.float32)
        self.y = (SLOPE * self.x + INTERCEPT + NOISE * rng.standard_normal((count, 1))).astype(np.float32)

    def __len__(self) -> int:
        return len(self.x)

    def name(self, i: int) -> str:
        """The point's number, for messages."""
        return f"point {i}"
