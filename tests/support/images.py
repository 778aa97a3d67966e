"""Generated images: in every format, folders of JPEGs, MNIST's files."""

import gzip
import io
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cputrain.data.formats.open import detect_source
from cputrain.data.formats.source import DatasetSummary


def encoded(image: Image.Image | NDArray[np.uint8], form: str = "PNG", **options: object) -> bytes:
    """Encode an image or pixels in a file format."""
    out = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(out, form, **options)
    return out.getvalue()


def jpeg(seed: int, side: int = 40) -> bytes:
    """Return noise with this seed, `side` pixels high and 8 more wide."""
    return encoded(np.random.default_rng(seed).integers(0, 255, (side, side + 8, 3), dtype=np.uint8), "JPEG")


def png(brightness: int) -> bytes:
    """Return a gray image of 12 x 10 pixels."""
    return encoded(np.full((10, 12, 3), brightness, dtype=np.uint8))


def write_files(root: Path, files: Mapping[str, bytes]) -> Path:
    """Write files at their paths below `root`."""
    for place, data in files.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(data)
    return root


def survey(path: str, *, val_fraction: float | None = None, label_column: str | None = None) -> DatasetSummary:
    """Count the images of a data folder, as seen by a recipe with these keys."""
    return detect_source(path, label_column).count(val_fraction)


def write_images(root: Path, *, classes: int = 3, train: int = 12, val: int = 5, size: int = 40) -> Path:
    """Write an image folder of JPEGs whose color depends on the class; `train` and `val` images per class."""
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
    """Write MNIST's files with noise that is brighter for higher digits; return the pixels, training images first."""
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
