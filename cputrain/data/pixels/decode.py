"""Encoded images -> square crops of uint8 pixels: by libjpeg-turbo where possible, else by Pillow."""

import io
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from affinity.errors import InputError, RunError
from cputrain.data.pixels import turbo
from cputrain.data.pixels.crops import CropFunction

Pixels = NDArray[np.uint8]
"""RGB values, shape (side, side, 3), or (n, side, side, 3) of several crops."""

Decode = Callable[[Sequence[bytes], Sequence[CropFunction], Pixels], list[str | None]]
"""Encoded images, their crop functions and an (n, side, side, 3) output; returns each image's error, or None."""

MEMORY = re.compile(r" <_io\.BytesIO object at \w+>")  # Pillow's name for the bytes of a file
# All that Pillow raises on files that are no image, or damaged.
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0  # TIFF 6.0, section 8


class ImageError(Exception):
    """An image cannot be decoded; holds the decoder's message."""

    def __init__(self, message: str) -> None:
        super().__init__(MEMORY.sub("", message))


def choose_decoder(requested: str, env: Mapping[str, str]) -> tuple[Decode, str]:
    """The decoder for data.decoder=`requested` ("auto", "turbo" or "pillow"), and its description with the reason.

    Raises InputError or RunError where "turbo" is requested and not available.
    """
    if requested == "pillow":
        return decode_by_pillow, "Pillow: data.decoder=pillow"
    try:
        fast = turbo.load(env)
    except (InputError, RunError) as error:
        if requested == "turbo":
            raise
        return decode_by_pillow, f"Pillow: {error}"

    def decode(encoded: Sequence[bytes], crops: Sequence[CropFunction], out: Pixels) -> list[str | None]:
        done = fast.decode(encoded, crops, out)
        each = zip(done, encoded, crops, out, strict=True)
        # What libjpeg-turbo leaves is another format, a rare kind of JPEG, or damaged: Pillow decides.
        return [None if ok else _error_of(data, crop, square) for ok, data, crop, square in each]

    return decode, f"libjpeg-turbo: {fast.path}"


def decode_by_pillow(encoded: Sequence[bytes], crops: Sequence[CropFunction], out: Pixels) -> list[str | None]:
    """Decode all images with Pillow."""
    return [_error_of(data, crop, square) for data, crop, square in zip(encoded, crops, out, strict=True)]


def _error_of(data: bytes, crop_of: CropFunction, out: Pixels) -> str | None:
    try:
        decode_one_by_pillow(data, crop_of, out)
    except ImageError as error:
        return str(error)
    return None


def decode_one_by_pillow(data: bytes, crop_of: CropFunction, out: Pixels) -> None:
    """Decode an image of any format into its (side, side, 3) output. Raises ImageError."""
    try:
        with _open(data) as image:
            crop = crop_of(image.width, image.height)
            left, top, width, height = crop.box
            scaled = image.crop((left, top, left + width, top + height)).resize(crop.size, Image.Resampling.BILINEAR)
            x, y = crop.at
            square = scaled.crop((x, y, x + crop.side, y + crop.side)).convert("RGB")
    except DAMAGE as error:
        raise ImageError(str(error)) from None
    pixels = np.asarray(square)
    out[:] = pixels[:, ::-1] if crop.flip else pixels


def _open(data: bytes) -> Image.Image:
    """The decoded image as RGB, or as gray, which is cheaper to scale before it is made RGB."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata; the pixels are what counts
        return bytes_of_pixels(Image.open(io.BytesIO(data)))


def bytes_of_pixels(image: Image.Image) -> Image.Image:
    """The image in 8 bits, as gray or as RGB: of deeper gray the upper 8 bits, as Pillow itself has of deeper colors.

    Raises ValueError for gray in 32 bits, signed or floating-point numbers, whose black and white are unknown.
    """
    if image.mode in ("RGB", "L"):
        return image
    if not image.mode.startswith(("I", "F")):
        return image.convert("RGB")
    # Mode I is of 32 bits, but where a file has 16 that Pillow, or its earlier releases, widen.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise ValueError("gray in 32-bit, signed or floating-point numbers has no known white: convert it to 8 bits")
    tags = getattr(image, "tag_v2", {})  # of TIFF
    depth = tags.get(BITS_PER_SAMPLE, (16,))[0]
    gray = (np.asarray(image) >> (depth - 8)).astype(np.uint8)
    return Image.fromarray(255 - gray if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO else gray)
