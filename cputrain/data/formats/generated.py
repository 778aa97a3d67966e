"""Data that is generated instead of read: random images to measure throughput, points for linear regression.

The seed determines all of it, the same on every worker.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cputrain.data.formats.dataset import LabeledImages
from cputrain.data.pixels.crops import CropFunction

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

    def decode(
        self, encoded: Sequence[bytes], _crops: Sequence[CropFunction], out: NDArray[np.uint8]
    ) -> list[str | None]:
        """Copy the images' pixels to `out`, shape (n, crop, crop, 3), like a decoder that never fails."""
        crop = out.shape[1]
        for data, square in zip(encoded, out, strict=True):
            square[:] = self._pixels[int.from_bytes(data, "little") % DIFFERENT, :crop, :crop]
        return [None] * len(out)


class Points:
    """Points (x, y) of the line y = SLOPE x + INTERCEPT with normal noise, x between 0 and LARGEST_X."""

    def __init__(self, count: int, seed: int, split: int) -> None:
        rng = np.random.Generator(np.random.Philox(key=[seed, split]))
        self.x = rng.uniform(0.0, LARGEST_X, (count, 1)).astype(np.float32)
        self.y = (SLOPE * self.x + INTERCEPT + NOISE * rng.standard_normal((count, 1))).astype(np.float32)

    @property
    def labels(self) -> NDArray[np.int64]:
        """Zeros: all points belong to one class."""
        return np.zeros(len(self), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.x)

    def read(self, i: int) -> bytes:
        """x and y as two float32 values."""
        return bytes(self.x[i].tobytes() + self.y[i].tobytes())

    def size(self, _i: int) -> int:
        """The bytes of a point."""
        return 8

    def name(self, i: int) -> str:
        """The point's number, for messages."""
        return f"point {i}"
