"""Turn encoded images into the pixels of a batch: crops, decoding by libjpeg-turbo or Pillow, augmentation.

This module does not depend on where images are stored or on their order. `native/` is compiled on first use.
"""

import ctypes
import ctypes.util
import io
import math
import platform
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_char_p, c_int, c_size_t, c_ubyte, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from cputrain.affinity.errors import InputError, RunError
from cputrain.data.order import image_rng
from cputrain.data.settings import Augmentation
from cputrain.files import placeholder_text
from cputrain.native_build import NativeExtension, ensure_compiled, library_path, loading

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

Pixels = NDArray[np.uint8]
"""RGB values, shape (side, side, 3), or (n, side, side, 3) for n crops."""

MEMORY = re.compile(r" <_io\.BytesIO object at \w+>")  # how Pillow's messages name a file in memory
# What Pillow raises for damaged files and files that are not images: RuntimeError for AVIF and DDS, AttributeError for
# SPIDER.
DAMAGE = (
    *(
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        RuntimeError,
        AttributeError,
        LookupError,
        TypeError,
        ArithmeticError,
    ),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)
BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0  # TIFF 6.0, section 8

# Signatures of formats that Pillow does not read; phones and downloads also name such files .jpg.
NOT_READ = {
    "HEIC": rb"....ftyp(hei|hev|mif1|msf1)",
    "JPEG XL": rb"\xff\x0a|....JXL ",
    "SVG": rb"\s*(<\?xml.*)?<svg",
    "DICOM": rb".{128}DICM",
    "PDF": rb"%PDF",
}
MAX_START_BYTES = 1024  # bytes

# Principal components of ImageNet's red, green and blue (0 to 1) and their standard deviations, for the color noise of
# Krizhevsky et al. 2012, 4.1. fb.resnet.torch and Intel Caffe's data layers use the same values.
DEVIATIONS = np.array([0.2175, 0.0188, 0.0045])
COMPONENTS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
FILL = (124, 116, 104)  # ImageNet's mean color, for pixels outside the image

MAX_STRENGTHS = 31  # number of RandAugment's strengths, 0 to 30

CROP, AUGMENT = 0, 1  # independent random streams of an image
MAX_CROP_ATTEMPTS = 10  # as in torchvision; after that, take the largest allowed center crop

# Principal components of ImageNet's red, green and blue (0 to 1) and their standard deviations, for the color noise of
# Krizhevsky et al. 2012, 4.1. fb.resnet.torch and Intel Caffe's data layers use the same values.
DEVIATIONS = np.array([0.2175, 0.0188, 0.0045])
COMPONENTS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
FILL = (124, 116, 104)  # ImageNet's mean color, for pixels outside the image
NONE = Augmentation()


def most_pixels() -> int | None:
    """Return the number of pixels above which an image is not decoded, by any decoder: Pillow's, which protects from
    small files that fill the memory. None if the program has set PIL.Image.MAX_IMAGE_PIXELS to None."""
    return None if Image.MAX_IMAGE_PIXELS is None else 2 * Image.MAX_IMAGE_PIXELS


class _Decoding(threading.local):
    """Pattern of a filter for warnings: matches any text in the threads that decode an image now, none in others."""

    now = False

    def match(self, _text: str) -> bool:
        """Return whether this thread decodes an image."""
        return self.now


class Crop(NamedTuple):
    """Square crop of an image, in pixels. The fields match Crop in pixels.cpp.

    The region of `width` x `height` at (left, top) is scaled to (scaled_width, scaled_height). The crop is the square
    of `side` pixels in the scaled region whose upper left corner is (x, y), mirrored left to right if `flip` is set.
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
"""(index of an image in a batch, its width, its height) -> its crop."""

NO_CROP = (0,) * len(Crop._fields)

Decode = Callable[[Sequence[bytes], Crops, Pixels], list[str | None]]
"""Decodes crops of encoded images into an (n, side, side, 3) output; returns each image's error, or None."""
DECODING = _Decoding()
IGNORED: Any = ("ignore", DECODING, Warning, None, 0)


class TurboDecoder:
    """JPEG decoder that any number of threads may use at the same time."""

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

        Returns False for each image that is damaged, too large, not a JPEG, or of a kind that this decoder does not
        support.
        The GIL is released during decoding.
        """
        count, side = len(encoded), out.shape[1]
        assert out.shape == (count, side, side, 3) and out.flags.c_contiguous
        data, lengths = (c_char_p * count)(*encoded), (c_size_t * count)(*map(len, encoded))
        sizes = (c_int * (2 * count))()
        self._sizes(count, data, lengths, sizes)
        table: list[int] = []
        limit = most_pixels() or math.inf
        for index, (width, height) in enumerate(zip(sizes[::2], sizes[1::2], strict=True)):
            table += crops(index, width, height) if 0 < width * height <= limit else NO_CROP
        done = (c_ubyte * count)()
        local = self._local.__dict__
        handle = local.get("handle") or local.setdefault("handle", _Handle(self._native, self._table))
        self._native.pixels_decode(
            *(handle.pointer, count, data, lengths),
            *((c_int * len(table))(*table), side, c_void_p(out.ctypes.data), done),
        )
        return [bool(ok) for ok in done]


class _Handle:
    """Decoder handle and buffers of one thread."""

    def __init__(self, native: ctypes.CDLL, table: ctypes.Array[c_void_p]) -> None:
        self._close = native.pixels_close
        self.pointer = c_void_p(native.pixels_open(table))

    def __del__(self) -> None:
        self._close(self.pointer)


def load_decoder(env: Mapping[str, str]) -> TurboDecoder:
    """Load the decoder, compiling it if necessary.

    Raises InputError if libjpeg-turbo 3 or a compiler is missing, RunError if the compiler fails.
    """
    library = find_library()
    turbo = ctypes.CDLL(library)
    table = (c_void_p * len(FUNCTIONS))(*(ctypes.cast(getattr(turbo, name), c_void_p).value for name in FUNCTIONS))
    return TurboDecoder(library, ensure_decoder(env), table)


def ensure_decoder(env: Mapping[str, str]) -> Path:
    """Return the path of the compiled native library. Raises InputError or RunError as ensure_compiled does."""
    return ensure_compiled(EXTENSION, decoder_path(env), env)


def find_library() -> str:
    """Return the path of libturbojpeg 3 or later, from the PyPI package turbojpeg or the system. Raises InputError."""
    packaged = next((str(path) for path in _packaged() if _has_all_functions(str(path))), None)
    if packaged:
        return packaged
    system = ctypes.util.find_library("turbojpeg")
    if system and _has_all_functions(system):
        return system
    reason = f"{system} is older" if system else "none was found"
    raise InputError(f"data.decoder=turbo: it needs libjpeg-turbo 3, but {reason}: pip install 'cputrain[turbo]'")


def _has_all_functions(library: str) -> bool:
    try:
        loaded = ctypes.CDLL(library)
    except OSError:
        return False
    return all(hasattr(loaded, name) for name in FUNCTIONS)


def _packaged() -> list[Path]:
    """Return the libraries in the PyPI package turbojpeg."""
    try:
        files = metadata.files("turbojpeg") or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.name.startswith("libturbojpeg")]


def decoder_build_command(cxx: str, output: Path) -> tuple[str, ...]:
    """Return the command that compiles the native library."""
    # Without contraction, results are the same on processors with and without fused multiply-add.
    return (cxx, "-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", str(SOURCES[0]), "-o", str(output))


EXTENSION = NativeExtension(
    title="the image decoder",
    requested_by="data.decoder=turbo",
    alternative="set data.decoder=pillow",
    argv=decoder_build_command,
)


def decoder_path(env: Mapping[str, str]) -> Path:
    """Return the path of the compiled library, which depends on the sources and the machine's architecture."""
    return library_path("pixels", (*(path.read_text(encoding="utf-8") for path in SOURCES), platform.machine()), env)


def cause_of(data: bytes, error: Exception) -> str:
    """Return why the image in these bytes cannot be decoded; `error` is what the decoder raised."""
    if not data:
        return "the file is empty"
    if isinstance(error, Image.DecompressionBombError):
        return f"the image has more than {most_pixels():,} pixels, which is not supported; scale it down"
    start = data[:MAX_START_BYTES]
    form = next((name for name, pattern in NOT_READ.items() if re.match(pattern, start, re.DOTALL)), None)
    if form:
        return f"the file is {form}, which is not supported; convert it to JPEG or PNG"
    return placeholder_text(data) or MEMORY.sub("", str(error))


def choose_decoder(requested: str, env: Mapping[str, str]) -> tuple[Decode, str]:
    """Return the decoder for data.decoder=`requested` ("auto", "turbo" or "pillow"), and a description of it.

    Raises InputError or RunError if "turbo" is requested but not available.
    """
    if requested == "pillow":
        return decode_by_pillow, "Pillow: data.decoder=pillow"
    try:
        fast = load_decoder(env)
    except (InputError, RunError) as error:
        if requested == "turbo":
            raise
        return decode_by_pillow, f"Pillow: {error}"

    def decode(encoded: Sequence[bytes], crops: Crops, out: Pixels) -> list[str | None]:
        done = fast.decode(encoded, crops, out)
        # The rest may be another format, a rare kind of JPEG, or damaged; Pillow decodes it or reports the error.
        return [None if ok else _decode_one(encoded, index, crops, out) for index, ok in enumerate(done)]

    return decode, f"libjpeg-turbo: {fast.path}"


def decode_by_pillow(encoded: Sequence[bytes], crops: Crops, out: Pixels) -> list[str | None]:
    """Decode images of any format with Pillow."""
    return [_decode_one(encoded, index, crops, out) for index in range(len(encoded))]


def _decode_one(encoded: Sequence[bytes], index: int, crops: Crops, out: Pixels) -> str | None:
    """Decode one of the images with Pillow into its place of `out`; return its error, or None."""
    try:
        with _without_warnings(), bytes_of_pixels(open_image(encoded[index])) as image:  # of large crops, too
            crop = crops(index, image.width, image.height)
            part = image.crop((crop.left, crop.top, crop.left + crop.width, crop.top + crop.height))
            scaled = part.resize((crop.scaled_width, crop.scaled_height), Image.Resampling.BILINEAR)
            square = scaled.crop((crop.x, crop.y, crop.x + crop.side, crop.y + crop.side)).convert("RGB")
    except DAMAGE as error:
        return cause_of(encoded[index], error)
    pixels = np.asarray(square)
    out[index] = pixels[:, ::-1] if crop.flip else pixels
    return None


def open_image(data: bytes, *, load: bool = True) -> Image.Image:
    """Open an image with Pillow, and decode it with `load_decoder`."""
    # Pillow warns about odd metadata, which does not affect the pixels, and about half the pixels that it refuses.
    with _without_warnings():
        image = Image.open(io.BytesIO(data))
        if load:
            image.load()
        return image


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore the warnings of this thread. `warnings.catch_warnings` changes those of all threads, and leaves them
    changed if two threads overlap; this filter stays, and has no effect on other code."""
    filters: Any = warnings.filters
    if not (filters and filters[0] is IGNORED):  # the program may have put its own in front
        filters.insert(0, IGNORED)
    before, DECODING.now = DECODING.now, True
    try:
        yield
    finally:
        DECODING.now = before


def bytes_of_pixels(image: Image.Image) -> Image.Image:
    """Convert the image to RGB or 8-bit gray, which is cheaper to scale. Deeper gray keeps its upper 8 bits, as deeper
    color does in Pillow.

    Raises ValueError for 32-bit, signed or floating-point gray, whose black and white are unknown.
    """
    if image.mode in ("RGB", "L"):
        return image
    if not image.mode.startswith(("I", "F")):
        return image.convert("RGB")
    # Mode I has 32 bits, except for 16-bit files that Pillow, or its earlier releases, widen to it.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise ValueError("32-bit, signed or floating-point gray has no known white: convert it to 8 bits")
    tags = getattr(image, "tag_v2", {})  # TIFF only
    depth = tags.get(BITS_PER_SAMPLE, (16,))[0]
    gray = (np.asarray(image) >> (depth - 8)).astype(np.uint8)
    return Image.fromarray(255 - gray if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO else gray)


def augment(pixels: NDArray[np.uint8], augmentation: Augmentation, rng: Random) -> None:
    """Change (side, side, 3) bytes in place: rotate, zoom and shift; brightness, contrast and saturation; lighting;
    RandAugment."""
    image = Image.fromarray(pixels)
    if augmentation.rotate or augmentation.zoom or augmentation.shift:
        image = _moved(image, augmentation, rng)
    for enhance, strength in (
        (ImageEnhance.Brightness, augmentation.brightness),
        (ImageEnhance.Contrast, augmentation.contrast),
        (ImageEnhance.Color, augmentation.saturation),
    ):
        if strength:
            image = enhance(image).enhance(rng.uniform(1 - strength, 1 + strength))
    if augmentation.lighting:
        light = 255 * COMPONENTS @ ([rng.gauss(0, augmentation.lighting) for _ in range(3)] * DEVIATIONS)
        pixels[:] = np.clip(np.rint(np.asarray(image) + light), 0, 255)
    else:
        pixels[:] = np.asarray(image)
    if augmentation.randaugment:
        randaugment(pixels, augmentation.randaugment, augmentation.randaugment_magnitude, rng)


def _moved(image: Image.Image, augmentation: Augmentation, rng: Random) -> Image.Image:
    """Rotate the image about its center, scale and shift it, with bilinear interpolation.

    Pillow takes the inverse transform, from new to old positions.
    """
    angle = 2 * math.pi * rng.uniform(-augmentation.rotate, augmentation.rotate)
    scale = rng.uniform(1 - augmentation.zoom, 1 + augmentation.zoom)
    dx, dy = (image.width * rng.uniform(-augmentation.shift, augmentation.shift) for _ in range(2))
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    x, y = image.width / 2, image.height / 2
    x_left, top = x - cos * (x + dx) - sin * (y + dy), y + sin * (x + dx) - cos * (y + dy)
    inverse = (cos, sin, x_left, -sin, cos, top)
    return image.transform(image.size, Image.Transform.AFFINE, inverse, Image.Resampling.BILINEAR, fillcolor=FILL)


def randaugment(pixels: NDArray[np.uint8], operations: int, magnitude: int, rng: Random) -> None:
    """Apply this number of RandAugment operations (Cubuk et al. 2020) of strength `magnitude` (0 to 30), in place, to
    (side, side, 3) bytes.

    torchvision's RandAugment draws from torch's global generator, which all threads of a loader share, so a resumed
    training would see different images.
    """
    transform = _torchvision_randaugment()
    image = Image.fromarray(pixels)
    for _ in range(operations):
        name = rng.choice(sorted(transform._AUGMENTATION_SPACE))
        strengths, signed = transform._AUGMENTATION_SPACE[name]
        values = strengths(MAX_STRENGTHS, *pixels.shape[:2])
        value = 0.0 if values is None else float(values[magnitude])
        if signed and rng.random() < 0.5:
            value = -value
        image = transform._apply_image_or_video_transform(
            image, name, value, interpolation=transform.interpolation, fill=transform._fill
        )
    pixels[:] = np.asarray(image)


@lru_cache
def _torchvision_randaugment() -> Any:
    from cputrain.models.vision import import_torchvision  # imports torch, which only RandAugment needs

    return import_torchvision("transforms.v2").RandAugment(fill=list(FILL))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """Crop and augmentation that turn an image into a square of image_size x image_size pixels.

    `crop`: "random_resized" (a box of random area and aspect ratio, scaled; Szegedy et al. 2014), "random" (a square at
    a random position, after scaling the short side to `short_side`, or to `image_size` if that is larger; Krizhevsky et
    al. 2012) or "center" (the center of the image scaled in the same way, never mirrored).
    `min_area` and `max_aspect` bound the random boxes; `flip` mirrors half of the random crops.
    """

    image_size: int
    short_side: int
    crop: Literal["random_resized", "random", "center"] = "center"
    min_area: float = 0.08
    max_aspect: float = 4 / 3
    flip: bool = True
    augmentation: Augmentation = NONE

    def crops(self, numbers: Sequence[int] = (), seed: int = 0, epoch: int = 0) -> Crops:
        """Return the crops of the images with these numbers, for a training with this seed in this epoch, counted from
        0; center crops depend on none of these."""

        def crop(index: int, width: int, height: int) -> Crop:
            side = self.image_size
            if self.crop == "random_resized":
                rng = image_rng(seed, epoch, numbers[index], CROP)
                box = random_box(width, height, rng, min_area=self.min_area, max_aspect=self.max_aspect)
                return Crop(*box, side, side, 0, 0, side, self.flip and rng.random() < 0.5)
            short = min(width, height)
            w, h = (max(side, int(self.short_side * length / short)) for length in (width, height))
            if self.crop == "center":
                return Crop(0, 0, width, height, w, h, round((w - side) / 2), round((h - side) / 2), side)
            rng = image_rng(seed, epoch, numbers[index], CROP)
            x, y = rng.randrange(w - side + 1), rng.randrange(h - side + 1)
            return Crop(0, 0, width, height, w, h, x, y, side, self.flip and rng.random() < 0.5)

        return crop

    def augment(
        self, numbers: Sequence[int], pixels: Pixels, problems: Sequence[str | None], seed: int, epoch: int
    ) -> None:
        """Augment (n, image_size, image_size, 3) pixels in place, except for images with a problem."""
        if self.augmentation:
            for number, square, problem in zip(numbers, pixels, problems, strict=True):
                if problem is None:
                    augment(square, self.augmentation, image_rng(seed, epoch, number, AUGMENT))


def center_crop(short_side: int, side: int) -> Crops:
    """Return center crops of images whose short side is scaled to `short_side`: torchvision's Resize, CenterCrop."""
    return Transform(image_size=side, short_side=short_side).crops()


def random_box(
    width: int, height: int, rng: Random, *, min_area: float, max_aspect: float
) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a random box in an image: area uniform in [min_area, 1] of the image's,
    aspect ratio log-uniform, position uniform."""
    log_aspect = math.log(max_aspect)
    for _ in range(MAX_CROP_ATTEMPTS):
        area = width * height * rng.uniform(min_area, 1)
        aspect = math.exp(rng.uniform(-log_aspect, log_aspect))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return rng.randrange(width - w + 1), rng.randrange(height - h + 1), w, h
    w, h = min(width, round(height * max_aspect)), min(height, round(width * max_aspect))
    return (width - w) // 2, (height - h) // 2, w, h
