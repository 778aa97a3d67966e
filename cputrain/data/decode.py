"""Encoded bytes -> one square of uint8 pixels, for training (random crop, flip) and for evaluation (centre crop)."""

import io
import math
import struct
import warnings
import zlib

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
Box = tuple[float, float, float, float]

CROP_TRIES = 10  # Szegedy et al. 2014 by way of torchvision: then the largest allowed centre crop
# All that Pillow raises on files that are no image, or damaged.
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


class ImageError(Exception):
    """An image that cannot be decoded, with the decoder's words."""


def decode_training(
    data: bytes, crop: int, rng: np.random.Generator, *, min_area: float, max_aspect: float, flip: bool
) -> Pixels:
    """A random part of the image scaled to (crop, crop, 3), perhaps mirrored. Raises ImageError."""
    try:
        with _open(data) as image:
            box = random_box(image.width, image.height, rng, min_area=min_area, max_aspect=max_aspect)
            pixels = _pixels(image.resize((crop, crop), Image.Resampling.BILINEAR, box=box))
    except DAMAGE as error:
        raise ImageError(str(error)) from None
    return pixels[:, ::-1] if flip and rng.random() < 0.5 else pixels


def decode_evaluation(data: bytes, resize: int, crop: int) -> Pixels:
    """The centre (crop, crop, 3) of the image after its short side is scaled to `resize`. Raises ImageError."""
    try:
        with _open(data) as image:
            short = min(image.size)
            size = tuple(max(crop, int(resize * side / short)) for side in image.size)
            scaled = image.resize((size[0], size[1]), Image.Resampling.BILINEAR)
            left, top = round((size[0] - crop) / 2), round((size[1] - crop) / 2)
            return _pixels(scaled.crop((left, top, left + crop, top + crop)))
    except DAMAGE as error:
        raise ImageError(str(error)) from None


def random_box(width: int, height: int, rng: np.random.Generator, *, min_area: float, max_aspect: float) -> Box:
    """A rectangle inside width x height: area uniform in [min_area, 1] of it, log-uniform aspect, uniform place."""
    log_aspect = math.log(max_aspect)
    for _ in range(CROP_TRIES):
        area = width * height * rng.uniform(min_area, 1)
        aspect = math.exp(rng.uniform(-log_aspect, log_aspect))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * max_aspect)), min(height, round(width * max_aspect))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _open(data: bytes) -> Image.Image:
    """The decoded image as RGB, or as grey, which is cheaper to scale before it is made RGB."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata; the pixels are what counts
        image = Image.open(io.BytesIO(data))
        return image if image.mode in ("RGB", "L") else image.convert("RGB")


def _pixels(image: Image.Image) -> Pixels:
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
