"""Splitting validation and test images off from a set of images."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from affinity.errors import InputError
from affinity.wording import counted
from cputrain.data.formats.dataset import Dataset, Images
from cputrain.data.order.permutations import Indices, epoch_order


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


def split_off(classes: tuple[str, ...], images: Images, fractions: Mapping[str, float], seed: int) -> Dataset:
    """Draw "val", or "val" and "test", from the images at random; the rest is "train".

    `fractions` are shares of all images. The total is exact up to rounding; classes are represented in proportion, each
    by at least one image. Raises InputError where a class has too few images.
    """
    order = epoch_order(len(images), seed, 0)
    labels = images.labels[order]
    members = [order[labels == label] for label in range(len(classes))]
    sizes = [len(each) for each in members]
    drawn = {split: apportioned(fraction, sizes) for split, fraction in fractions.items()}
    parts: dict[str, list[Indices]] = {split: [] for split in ("train", *fractions)}
    for name, mine, *counts in zip(classes, members, *drawn.values(), strict=True):
        if sum(counts) >= len(mine):
            requested = " and ".join(f"{fraction:g}" for fraction in fractions.values())
            raise InputError(
                f"class {name} has {counted(len(mine), 'image')}: too few to split off {requested} of them"
            )
        rest = mine
        for split, count in zip(fractions, counts, strict=True):
            parts[split].append(rest[:count])
            rest = rest[count:]
        parts["train"].append(rest)
    subsets = {split: Subset(images, np.sort(np.concatenate(each))) for split, each in parts.items()}
    return Dataset(classes=classes, train=subsets["train"], val=subsets["val"], test=subsets.get("test"))


def apportioned(fraction: float, sizes: Sequence[int]) -> list[int]:
    """How many images of each class make that fraction of all: largest remainders (Hamilton), at least 1 each."""
    exact = [fraction * size for size in sizes]
    counts = [max(1, int(share)) for share in exact]
    missing = round(fraction * sum(sizes)) - sum(counts)
    by_remainder = sorted(range(len(sizes)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: max(0, missing)]:
        counts[i] += 1
    return counts
