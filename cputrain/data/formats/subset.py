"""Splitting validation and test images off from a set of images."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cputrain.affinity.errors import InputError
from cputrain.data.formats.dataset import Dataset, Images, OwnSplits, PiecewiseImages
from cputrain.data.formats.places import BOTH_SPLITS, VAL_FRACTION, counts_to_draw, describe_drawn, order_notes
from cputrain.data.order import Indices, epoch_order


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


def split_off(classes: tuple[str, ...], images: Images, fractions: Mapping[str, float], seed: int) -> Dataset:
    """Draw "val", or "val" and "test", from the images at random; the rest is "train".

    `fractions` are shares of all images. The total is exact up to rounding; classes are represented in proportion, each
    by at least one image. Raises InputError where a class has too few images.
    """
    order = epoch_order(len(images), seed, 0)
    labels = images.labels[order]
    members = [order[labels == label] for label in range(len(classes))]
    drawn = counts_to_draw(classes, [len(each) for each in members], fractions)
    parts: dict[str, list[Indices]] = {split: [] for split in ("train", *fractions)}
    for mine, *counts in zip(members, *drawn.values(), strict=True):
        rest = mine
        for split, count in zip(fractions, counts, strict=True):
            parts[split].append(rest[:count])
            rest = rest[count:]
        parts["train"].append(rest)
    subsets = {split: subset_of(images, np.sort(np.concatenate(each))) for split, each in parts.items()}
    return Dataset(classes=classes, train=subsets["train"], val=subsets["val"], test=subsets.get("test"))


def with_validation(
    source: str,
    own: OwnSplits | Dataset,
    val_fraction: float | None = None,
    test_fraction: float | None = None,
    *,
    seed: int,
) -> Dataset:
    """The splits of a source with validation images: its own ones, or images drawn from its training images.

    They are drawn where it has none (a share of VAL_FRACTION if `val_fraction` is None), or `val_fraction` is given;
    its own validation images are the test split then. Raises InputError where it has a test split, too.
    """
    notes = (*own.notes, *order_notes(own.classes))
    if own.val is not None and val_fraction is None:
        return Dataset(classes=own.classes, train=own.train, val=own.val, test=own.test, notes=notes)
    if own.test is not None:
        raise InputError(f"{source}{BOTH_SPLITS}")
    share = VAL_FRACTION if val_fraction is None else val_fraction
    fractions = {"val": share} | ({} if test_fraction is None else {"test": test_fraction})
    drawn = split_off(own.classes, own.train, fractions, seed)
    if own.val is not None:
        return replace(drawn, test=own.val, notes=notes)
    return replace(drawn, notes=(*notes, describe_drawn(source, len(drawn.val), share)))
