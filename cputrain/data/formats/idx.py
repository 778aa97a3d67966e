"""MNIST's files in the idx format: arrays of images and of labels, gzipped or not."""

import gzip
import io
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from affinity.errors import InputError
from affinity.wording import counted
from cputrain.data.formats.dataset import Dataset

FILES = {"train": ("train-images", "train-labels"), "val": ("t10k-images", "t10k-labels")}
UNSIGNED_BYTES = 8


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


def open_mnist(source: Path) -> Dataset:
    """Open a folder with the four files. Raises InputError that names the one that is missing or wrong."""
    splits = {}
    for split, (images, labels) in FILES.items():
        path = _find(source, f"{images}-idx3-ubyte")
        pixels, numbers = read_idx(path, 3), read_idx(_find(source, f"{labels}-idx1-ubyte"), 1)
        if len(pixels) != len(numbers):
            raise InputError(f"{path} has {len(pixels):,} images, but there are {len(numbers):,} labels")
        splits[split] = ArrayImages(pixels, numbers, path)
    count = 1 + max(int(split.labels.max()) for split in splits.values())
    return Dataset(classes=tuple(str(number) for number in range(count)), **splits)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of an idx file: two zero bytes, type, dimensions, their sizes as big-endian words, the values.

    Raises InputError on any other file.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    head = struct.pack(">HBB", 0, UNSIGNED_BYTES, dimensions)
    if data[:4] != head or len(data) < 4 + 4 * dimensions:
        raise InputError(f"{path} is not an idx file of bytes in {counted(dimensions, 'dimension')}")
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions)
    if len(values) != np.prod(shape):
        raise InputError(f"{path} has {len(values):,} values, but its header describes {' x '.join(map(str, shape))}")
    return values.reshape(shape)


def _find(source: Path, name: str) -> Path:
    dotted = name.replace("-idx", ".idx")
    candidates = [source / (stem + suffix) for stem in (name, dotted) for suffix in ("", ".gz")]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise InputError(f"{source} has no {name} (or {name}.gz): name the folder that contains MNIST's four files")
    return found
