"""Images made on the spot: folders of JPEGs, MNIST's files."""

import gzip
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from cputrain.data.formats import Survey, detect


def survey(path: str, *, val_fraction: float | None = None, label_column: str | None = None) -> Survey:
    """The counts of a data folder, as a recipe with these keys has them."""
    return detect(path, label_column).count(val_fraction)


def write_images(root: Path, *, classes: int = 3, train: int = 12, val: int = 5, size: int = 40) -> Path:
    """An image folder of JPEGs whose color depends on the class; `train` and `val` images of each class."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for label in range(classes):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (size, size + 8, 3), dtype=np.uint8)
                pixels[..., label % 3] += 100
                Image.fromarray(pixels).save(folder / f"{i:03d}.jpg", quality=90)
    return root


def write_mnist(folder: Path, *, train: int, val: int, zipped: bool) -> np.ndarray:
    """MNIST's files, of noise that is brighter the higher its digit; returns the pixels, those of train first."""
    folder.mkdir(exist_ok=True)
    labels = (np.arange(train + val) % 10).astype(np.uint8)
    noise = np.random.default_rng(0).integers(0, 120, (train + val, 28, 28), dtype=np.uint8)
    pixels = noise + 13 * labels[:, None, None]
    for name, part in (("train", slice(0, train)), ("t10k", slice(train, None))):
        for kind, values in (("images-idx3", pixels[part]), ("labels-idx1", labels[part])):
            data = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
            data += values.tobytes()
            path = folder / f"{name}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(data) if zipped else data)
    return pixels
