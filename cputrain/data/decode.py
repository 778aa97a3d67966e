"""Encoded bytes -> the square of uint8 pixels that is wanted of them: by libjpeg-turbo where it can, else by Pillow."""

import io
import struct
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from affinity.errors import InputError, RunError
from cputrain.data import turbo
from cputrain.data.views import Look

Pixels = NDArray[np.uint8]
Decode = Callable[[Sequence[bytes], Sequence[Look], Pixels], list[str | None]]
"""Encoded images, what is wanted of each, and the (n, side, side, 3) places for that; of each what is wrong with it."""

# All that Pillow raises on files that are no image, or damaged.
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


class ImageError(Exception):
    """An image that cannot be decoded, with the decoder's words."""


def choose_decoder(asked: str, env: Mapping[str, str]) -> tuple[Decode, str]:
    """The decoder that data.decoder asks for, and what it is.

    Raises InputError or RunError where "turbo" is asked for and cannot be had.
    """
    if asked == "pillow":
        return all_by_pillow, "Pillow: data.decoder=pillow"
    try:
        fast = turbo.load(env)
    except (InputError, RunError) as error:
        if asked == "turbo":
            raise
        return all_by_pillow, f"Pillow: {error}"

    def decode(encoded: Sequence[bytes], looks: Sequence[Look], places: Pixels) -> list[str | None]:
        done = fast.decode(encoded, looks, places)  # not done: no JPEG, a rare kind, or damaged: Pillow's to judge
        each = zip(done, encoded, looks, places, strict=True)
        return [None if was else _by_pillow(data, look, place) for was, data, look, place in each]

    return decode, f"libjpeg-turbo: {fast.path}"


def all_by_pillow(encoded: Sequence[bytes], looks: Sequence[Look], places: Pixels) -> list[str | None]:
    """Decode with Pillow alone."""
    return [_by_pillow(data, look, place) for data, look, place in zip(encoded, looks, places, strict=True)]


def _by_pillow(data: bytes, look: Look, place: Pixels) -> str | None:
    try:
        decode_pillow(data, look, place)
    except ImageError as error:
        return str(error)
    return None


def decode_pillow(data: bytes, look: Look, place: Pixels) -> None:
    """Decode one image into its (side, side, 3) place with Pillow, which takes all sorts. Raises ImageError."""
    try:
        with _open(data) as image:
            view = look(image.width, image.height)
            left, top, width, height = view.box
            part = image.crop((left, top, left + width, top + height)).resize(view.size, Image.Resampling.BILINEAR)
            x, y = view.at
            square = part.crop((x, y, x + view.side, y + view.side)).convert("RGB")
    except DAMAGE as error:
        raise ImageError(str(error)) from None
    pixels = np.asarray(square)
    place[:] = pixels[:, ::-1] if view.flip else pixels


def _open(data: bytes) -> Image.Image:
    """The decoded image as RGB, or as grey, which is cheaper to scale before it is made RGB."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata; the pixels are what counts
        image = Image.open(io.BytesIO(data))
        return image if image.mode in ("RGB", "L") else image.convert("RGB")
