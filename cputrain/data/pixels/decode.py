"""JPEG -> cropped pixels, by libjpeg-turbo or Pillow."""

import ctypes
import ctypes.util
import hashlib
import io
import platform
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char_p, c_int, c_size_t, c_ubyte, c_void_p
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import cache_folder
from cputrain.native_build import NativeExtension, ensure_compiled, loading

SOURCES = tuple(Path(__file__).parent / "native" / name for name in ("pixels.cpp", "jpeg_rows.hpp", "scale.hpp"))
FUNCTIONS = (
    "tj3Init",
    "tj3Destroy",
    "tj3Get",
    "tj3DecompressHeader",
    "tj3SetCroppingRegion",
    "tj3Decompress8",
    "tj3GetErrorStr",
)


class Crop(NamedTuple):
    """A square to take from an image, all in pixels: a row of the table that pixels.cpp has, whose Crop it is.

    The part of the image of `width` x `height` at (left, top) is scaled to (scaled_width, scaled_height). The crop is
    the square of `side` pixels in it whose upper left corner is (x, y), mirrored left to right with `flip`.
    """

    left: int
    top: int
    width: int
    height: int
    scaled_width: int
    scaled_height: int
    x: int
    y: int
    side: int
    flip: bool = False


Crops = Callable[[int, int, int], Crop]
"""An image's place in a batch, its width and height -> the crop to take from it."""

NO_CROP = (0,) * len(Crop._fields)


class TurboDecoder:
    """A decoder of JPEGs that any number of threads may use at once."""

    def __init__(self, library: str, native: Path, table: ctypes.Array[c_void_p]) -> None:
        self.path = library
        self._table = table
        with loading(native, EXTENSION.requested_by, EXTENSION.alternative):
            self._native = ctypes.CDLL(str(native))
        self._native.pixels_open.restype = c_void_p
        self._native.pixels_close.argtypes = (c_void_p,)
        self._sizes = ctypes.PyDLL(str(native)).pixels_sizes  # keeps the GIL: releasing it takes longer than the call
        self._local = threading.local()

    def decode(self, encoded: Sequence[bytes], crops: Crops, out: NDArray[np.uint8]) -> list[bool]:
        """Decode a crop of each JPEG into its place of `out`, shape (n, side, side, 3).

        Returns False for each image that is no JPEG, damaged, or of a kind that this decoder does not support. The GIL
        is released while several images are decoded.
        """
        count, side = len(encoded), out.shape[1]
        assert out.shape == (count, side, side, 3) and out.flags.c_contiguous
        data, lengths = (c_char_p * count)(*encoded), (c_size_t * count)(*map(len, encoded))
        sizes = (c_int * (2 * count))()
        self._sizes(count, data, lengths, sizes)
        table: list[int] = []
        for place, (width, height) in enumerate(zip(sizes[::2], sizes[1::2], strict=True)):
            table += crops(place, width, height) if width else NO_CROP
        done = (c_ubyte * count)()
        local = self._local.__dict__
        handle = local.get("handle") or local.setdefault("handle", _Handle(self._native, self._table))
        self._native.pixels_decode(
            *(handle.pointer, count, data, lengths),
            *((c_int * len(table))(*table), side, c_void_p(out.ctypes.data), done),
        )
        return [bool(each) for each in done]


class _Handle:
    """A thread's own decoder and its buffers."""

    def __init__(self, native: ctypes.CDLL, table: ctypes.Array[c_void_p]) -> None:
        self._close = native.pixels_close
        self.pointer = c_void_p(native.pixels_open(table))

    def __del__(self) -> None:
        self._close(self.pointer)


def load(env: Mapping[str, str]) -> TurboDecoder:
    """The decoder, compiled if that is not done.

    Raises InputError where libjpeg-turbo 3 or a compiler is missing, RunError where the compiler fails.
    """
    library = find_library()
    turbo = ctypes.CDLL(library)
    table = (c_void_p * len(FUNCTIONS))(*(ctypes.cast(getattr(turbo, name), c_void_p).value for name in FUNCTIONS))
    return TurboDecoder(library, ensure_built(env), table)


def ensure_built(env: Mapping[str, str]) -> Path:
    """The compiled native library. Raises InputError or RunError as ensure_compiled does."""
    return ensure_compiled(EXTENSION, built_path(env), env)


def find_library() -> str:
    """libturbojpeg of release 3 or later: that of the PyPI package turbojpeg, or the system's. Raises InputError."""
    packaged = next((str(path) for path in _packaged() if _has_all_functions(str(path))), None)
    if packaged:
        return packaged
    system = ctypes.util.find_library("turbojpeg")
    if system and _has_all_functions(system):
        return system
    found = f"{system} is older" if system else "none was found"
    raise InputError(f"data.decoder=turbo: libjpeg-turbo 3 is needed, {found}: pip install 'cputrain[turbo]'")


def _has_all_functions(library: str) -> bool:
    try:
        found = ctypes.CDLL(library)
    except OSError:
        return False
    return all(hasattr(found, name) for name in FUNCTIONS)


def _packaged() -> list[Path]:
    """The libraries in the PyPI package turbojpeg."""
    try:
        files = metadata.files("turbojpeg") or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.name.startswith("libturbojpeg")]


def command_line(cxx: str, output: Path) -> tuple[str, ...]:
    """The tokens that compile the native library."""
    # No contraction: multiplying and adding are rounded each, as where the processor has no fused form.
    return (cxx, "-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", str(SOURCES[0]), "-o", str(output))


EXTENSION = NativeExtension(
    title="the image decoder",
    requested_by="data.decoder=turbo",
    alternative="set data.decoder=pillow",
    argv=command_line,
)


def built_path(env: Mapping[str, str]) -> Path:
    """Where the compiled library lies: the name depends on the sources and the machine's architecture."""
    parts = (*(path.read_text(encoding="utf-8") for path in SOURCES), platform.machine())
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache_folder(env) / f"pixels-{platform.machine()}-{key}" / "pixels.so"


Pixels = NDArray[np.uint8]
"""RGB values, shape (side, side, 3), or (n, side, side, 3) of several crops."""

Decode = Callable[[Sequence[bytes], Crops, Pixels], list[str | None]]
"""Encoded images, their crops and an (n, side, side, 3) output; returns each image's error, or None."""

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
        fast = load(env)
    except (InputError, RunError) as error:
        if requested == "turbo":
            raise
        return decode_by_pillow, f"Pillow: {error}"

    def decode(encoded: Sequence[bytes], crops: Crops, out: Pixels) -> list[str | None]:
        done = fast.decode(encoded, crops, out)
        # What libjpeg-turbo leaves is another format, a rare kind of JPEG, or damaged: Pillow decides.
        return [None if ok else _error_of(encoded, place, crops, out) for place, ok in enumerate(done)]

    return decode, f"libjpeg-turbo: {fast.path}"


def decode_by_pillow(encoded: Sequence[bytes], crops: Crops, out: Pixels) -> list[str | None]:
    """Decode all images, of any format, with Pillow."""
    return [_error_of(encoded, place, crops, out) for place in range(len(encoded))]


def _error_of(encoded: Sequence[bytes], place: int, crops: Crops, out: Pixels) -> str | None:
    """Decode one of the images with Pillow into its place; its error, or None."""
    try:
        with _open(encoded[place]) as image:
            crop = crops(place, image.width, image.height)
            part = image.crop((crop.left, crop.top, crop.left + crop.width, crop.top + crop.height))
            scaled = part.resize((crop.scaled_width, crop.scaled_height), Image.Resampling.BILINEAR)
            square = scaled.crop((crop.x, crop.y, crop.x + crop.side, crop.y + crop.side)).convert("RGB")
    except DAMAGE as error:
        return MEMORY.sub("", str(error))
    pixels = np.asarray(square)
    out[place] = pixels[:, ::-1] if crop.flip else pixels
    return None


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
