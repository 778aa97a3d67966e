"""Inspecting an encoded image, and encoding it anew as a smaller JPEG."""

import io
import warnings
from dataclasses import dataclass

from PIL import Image

from cputrain.data.pixels.decode import DAMAGE, ImageError, bytes_of_pixels

NEARLY_LOSSLESS = 100  # the JPEG quality that TensorFlow's ImageNet scripts convert PNG and CMYK files with
JPEG_END = b"\xff\xd9"
EXIF_ORIENTATION = 0x0112
JPEG_START = b"\xff\xd8\xff"  # also of what Pillow calls MPO: photos with a preview or a second picture behind them
SUFFIXES = {"TIFF": ".tif", "JPEG2000": ".jp2"}  # others are the format's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """An image as it is stored in a shard: its bytes, the suffix of its real format, width and height in pixels.

    `unusual` lists properties: "gray", "16 bits", "cmyk", "no jpeg", "exif rotation" (ignored, as torchvision does),
    "no end marker".
    """

    data: bytes
    suffix: str
    width: int
    height: int
    unusual: tuple[str, ...]


def encode(data: bytes, *, short_side: int | None, quality: int | None, jpeg_only: bool) -> Encoded:
    """The image for a shard: unchanged with quality None, else a JPEG of that quality and at most that short side.

    With `jpeg_only` images that are not gray or RGB JPEGs are converted even with quality None. Raises ImageError.
    """
    if quality is not None:
        return reencode(data, short_side=short_side, quality=quality)
    image = inspect(data)
    if jpeg_only and {"no jpeg", "cmyk"} & {*image.unusual}:
        return reencode(data, short_side=None, quality=NEARLY_LOSSLESS)
    return image


def inspect(data: bytes) -> Encoded:
    """The image unchanged. It is decoded only where its end marker is missing or it is no JPEG. Raises ImageError."""
    try:
        with _open(data) as image:
            unusual = _oddities(image, data)
            if "no end marker" in unusual or "no jpeg" in unusual:
                bytes_of_pixels(image).load()
            name = image.format or ""
            suffix = SUFFIXES.get(name, f".{name.lower()}") if "no jpeg" in unusual else ".jpg"
            return Encoded(data=data, suffix=suffix, width=image.width, height=image.height, unusual=unusual)
    except DAMAGE as error:
        raise ImageError(str(error)) from None


def reencode(data: bytes, *, short_side: int | None, quality: int) -> Encoded:
    """The image as a JPEG (4:2:0, or gray if it is gray), its short side at most `short_side`. Raises ImageError."""
    try:
        with _open(data) as image:
            unusual = _oddities(image, data)
            pixels = bytes_of_pixels(image)
            short = min(pixels.size)
            if short_side is not None and short > short_side:
                size = (round(pixels.width * short_side / short), round(pixels.height * short_side / short))
                pixels = pixels.resize(size, Image.Resampling.BICUBIC)
            out = io.BytesIO()
            # Optimized tables: 4 % smaller files for a little time now. A restart marker after each row of blocks: 1 %
            # larger, but a part of the image can be decoded without the rows above it.
            pixels.save(out, "JPEG", quality=quality, subsampling="4:2:0", optimize=True, restart_marker_rows=1)
    except DAMAGE as error:
        raise ImageError(str(error)) from None
    return Encoded(data=out.getvalue(), suffix=".jpg", width=pixels.width, height=pixels.height, unusual=unusual)


def _open(data: bytes) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of unusual metadata; the pixels are what counts
        return Image.open(io.BytesIO(data))


def _oddities(image: Image.Image, data: bytes) -> tuple[str, ...]:
    is_jpeg = data.startswith(JPEG_START)
    found = {
        "no jpeg": not is_jpeg,
        "gray": image.mode in ("L", "LA", "1") or image.mode.startswith("I"),
        "16 bits": image.mode.startswith("I"),
        "cmyk": image.mode == "CMYK",
        "exif rotation": _orientation(image) not in (0, 1),
        "no end marker": is_jpeg and not data.endswith(JPEG_END),
    }
    return tuple(name for name, is_so in found.items() if is_so)


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation; 0 where there is none, or it cannot be read."""
    try:
        value = image.getexif().get(EXIF_ORIENTATION, 0)
    except DAMAGE:
        return 0
    return value if isinstance(value, int) else 0
