"""MNIST's files in the idx format: arrays of images and of labels, gzipped or not."""

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from affinity.errors import InputError
from affinity.wording import counted
from cputrain.data.formats.dataset import OwnSplits

FILES = {"train": ("train-images", "train-labels"), "val": ("t10k-images", "t10k-labels")}
UNSIGNED_BYTES = 8
MAX_VALUES = 1 << 32


class ArrayImages:
    """Gray images in an array, (n, height, width) uint8, encoded as PNGs when they are read."""

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[np.uint8], path: Path) -> None:
        self._pixels, self._path = pixels, path
        self._labels = labels.astype(np.int64)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image, shape (n,)."""
        return self._labels

    def __len__(self) -> int:
        return len(self._pixels)

    def read(self, i: int) -> bytes:
        """Image i as a gray PNG."""
        out = io.BytesIO()
        Image.fromarray(self._pixels[i]).save(out, "PNG")
        return out.getvalue()

    def size(self, i: int) -> int:
        """The image's pixels, one byte each."""
        return int(self._pixels[i].size)

    def name(self, i: int) -> str:
        """The file and the image's number in it."""
        return f"{self._path}:{i}"


def open_mnist(source: Path) -> OwnSplits:
    """Open a folder with the four files. Raises InputError that names the one that is missing or wrong."""
    splits = {}
    for split, (images, labels) in FILES.items():
        path = _find(source, f"{images}-idx3-ubyte")
        pixels, numbers = read_idx(path, 3), read_idx(_find(source, f"{labels}-idx1-ubyte"), 1)
        if len(pixels) != len(numbers):
            raise InputError(f"{path} has {len(pixels):,} images, but there are {len(numbers):,} labels")
        splits[split] = ArrayImages(pixels, numbers, path)
    count = 1 + max(int(split.labels.max()) for split in splits.values())
    return OwnSplits.of(tuple(str(number) for number in range(count)), splits)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of an idx file: two zero bytes, type, dimensions, their sizes as big-endian words, the values.

    Raises InputError on any other file.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4 + 4 * dimensions)
            shape = _shape(path, head, dimensions)
            data = file.read(math.prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if len(data) != math.prod(shape):
        found = f"{len(data):,}" if len(data) < math.prod(shape) else "more"
        raise InputError(f"{path} has {found} values, but its header describes {' x '.join(map(str, shape))}")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _shape(path: Path, head: bytes, dimensions: int) -> tuple[int, ...]:
    if head[:4] != struct.pack(">HBB", 0, UNSIGNED_BYTES, dimensions) or len(head) < 4 + 4 * dimensions:
        raise InputError(f"{path} is not an idx file of bytes in {counted(dimensions, 'dimension')}")
    shape = struct.unpack_from(f">{dimensions}I", head, 4)
    if math.prod(shape) > MAX_VALUES:
        raise InputError(f"{path} describes {' x '.join(map(str, shape))} values, more than {MAX_VALUES:,}")
    return shape


def _find(source: Path, name: str) -> Path:
    dotted = name.replace("-idx", ".idx")
    candidates = [source / (stem + suffix) for stem in (name, dotted) for suffix in ("", ".gz")]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise InputError(f"{source} has no {name} (or {name}.gz): name the folder that contains MNIST's four files")
    return found
