"""Encoded bytes -> the square of uint8 pixels that is wanted of them: by libjpeg-turbo where it can, else by Pillow."""

import io
import struct
import warnings
import zlib
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from affinity.errors import InputError, RunError
from cputrain.data import turbo
from cputrain.data.views import Look

Pixels = NDArray[np.uint8]
Decode = Callable[[bytes, Look, Pixels], None]
"""An encoded image, what is wanted of it, and the (side, side, 3) place for that. Raises ImageError."""

# All that Pillow raises on files that are no image, or damaged.
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


class ImageError(Exception):
    """An image that cannot be decoded, with the decoder's words."""


def choose_decoder(asked: str, env: Mapping[str, str]) -> tuple[Decode, str]:
    """The decoder that data.decoder asks for, and what it is.

    Raises InputError or RunError where "turbo" is asked for and cannot be had.
    """
    if asked == "pillow":
        return decode_pillow, "Pillow: data.decoder=pillow"
    try:
        fast = turbo.load(env)
    except (InputError, RunError) as error:
        if asked == "turbo":
            raise
        return decode_pillow, f"Pillow: {error}"

    def decode(data: bytes, look: Look, place: Pixels) -> None:
        if not fast.decode(data, look, place):  # no JPEG, a rare kind of one, or a damaged one: Pillow's to judge
            decode_pillow(data, look, place)

    return decode, f"libjpeg-turbo: {fast.path}"


def decode_pillow(data: bytes, look: Look, place: Pixels) -> None:
    """Decode with Pillow, which takes all that it takes for an image."""
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
