"""Data that nobody stores: random images for measuring throughput, points for linear regression.

The seed decides all of it, the same on every worker.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cputrain.data.decode import Pixels
from cputrain.data.images import Dataset
from cputrain.data.loader import Batch
from cputrain.data.order import Order
from cputrain.data.survey import Survey

DIFFERENT = 64  # images of random pixels; the others repeat them
SLOPE, INTERCEPT, NOISE, LARGEST_X = 2.0, 1.0, 0.5, 10.0


class SyntheticImages:
    """Random pixels with random labels: image i has the pixels of image i modulo DIFFERENT."""

    def __init__(self, count: int, classes: int, side: int, seed: int) -> None:
        rng = np.random.Generator(np.random.Philox(key=[seed, count]))
        self._labels = rng.integers(0, classes, count)
        self._pixels = rng.integers(0, 256, (min(count, DIFFERENT), side, side, 3), dtype=np.uint8)

    @property
    def labels(self) -> NDArray[np.int64]:
        """Label of each image, shape (n,)."""
        return self._labels

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, _i: int) -> bytes:
        """Nothing: there are no encoded images."""
        return b""

    def size(self, _i: int) -> int:
        """Bytes of an encoded image: none."""
        return 0

    def name(self, i: int) -> str:
        """For messages."""
        return f"synthetic image {i}"

    def fill(self, numbers: Sequence[int], places: Pixels) -> list[str | None]:
        """Copy the images' pixels to (n, crop, crop, 3) places, as a decoder would write them there."""
        crop = places.shape[1]
        for number, place in zip(numbers, places, strict=True):
            place[:] = self._pixels[number % DIFFERENT, :crop, :crop]
        return [None] * len(places)


class Points:
    """Points (x, y) of the line y = SLOPE x + INTERCEPT with normal noise, x between 0 and LARGEST_X."""

    def __init__(self, count: int, seed: int, split: int) -> None:
        rng = np.random.Generator(np.random.Philox(key=[seed, split]))
        self.x = rng.uniform(0.0, LARGEST_X, (count, 1)).astype(np.float32)
        self.y = (SLOPE * self.x + INTERCEPT + NOISE * rng.standard_normal((count, 1))).astype(np.float32)

    @property
    def labels(self) -> NDArray[np.int64]:
        """All of one class."""
        return np.zeros(len(self), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.x)

    def read(self, i: int) -> bytes:
        """x and y as two float32 values."""
        return bytes(self.x[i].tobytes() + self.y[i].tobytes())

    def size(self, _i: int) -> int:
        """Bytes of a point."""
        return 8

    def name(self, i: int) -> str:
        """For messages."""
        return f"point {i}"

    def batches(self, shares: Iterable[Order]) -> Iterator[Batch]:
        """One batch for each share of points: images (N, 1) are the x, labels (N, 1) the y, both float32."""
        for share in shares:
            x, y = torch.from_numpy(self.x[share]), torch.from_numpy(self.y[share])
            yield Batch(images=x, labels=y, weights=torch.ones(len(share)), damaged=())


def synthetic(found: Survey, side: int, seed: int) -> Dataset:
    """The images that a survey counts, of side x side pixels."""
    train, val = (SyntheticImages(count, len(found.classes), side, seed) for count in (found.train, found.val))
    return Dataset(classes=found.classes, train=train, val=val)


def line(found: Survey, seed: int) -> Dataset:
    """The points that a survey counts."""
    return Dataset(classes=found.classes, train=Points(found.train, seed, 0), val=Points(found.val, seed, 1))
