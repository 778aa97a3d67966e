"""Which part of an image becomes the network's input: pure functions of the image's size."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

CROP_TRIES = 10  # Szegedy et al. 2014 by way of torchvision: then the largest allowed center crop

Box = tuple[int, int, int, int]
"""Left, top, width and height of a part of an image, in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crop:
    """A square to take from an image, all in pixels.

    The part `box` of the image is scaled to `size` (width, height). The crop is the square of `side` pixels in it whose
    upper left corner is `at` (x, y), mirrored left to right with `flip`.
    """

    box: Box
    size: tuple[int, int]
    at: tuple[int, int]
    side: int
    flip: bool = False


CropFunction = Callable[[int, int], Crop]
"""The width and height of an image -> the crop to take from it."""


RngFactory = Callable[[], Random]
"""Makes a random number generator, each time in the same state: cropping an image twice gives the same crop."""


def random_resized_crop(
    side: int, make_rng: RngFactory, *, min_area: float, max_aspect: float, flip: bool
) -> CropFunction:
    """A box of random area and aspect ratio, scaled to side x side (Szegedy et al. 2014).

    With `flip` half of the crops are mirrored.
    """

    def crop(width: int, height: int) -> Crop:
        rng = make_rng()
        box = random_box(width, height, rng, min_area=min_area, max_aspect=max_aspect)
        return Crop(box=box, size=(side, side), at=(0, 0), side=side, flip=flip and rng.random() < 0.5)

    return crop


def random_crop(short_side: int, side: int, make_rng: RngFactory, *, flip: bool) -> CropFunction:
    """A square at a random place of the image whose short side is scaled to `short_side` (Krizhevsky et al. 2012).

    With `flip` half of the crops are mirrored.
    """

    def crop(width: int, height: int) -> Crop:
        rng = make_rng()
        size = _scaled(width, height, short_side, side)
        at = rng.randrange(size[0] - side + 1), rng.randrange(size[1] - side + 1)
        return Crop(box=(0, 0, width, height), size=size, at=at, side=side, flip=flip and rng.random() < 0.5)

    return crop


def center_crop(short_side: int, side: int) -> CropFunction:
    """The center square of the image whose short side is scaled to `short_side`: torchvision's Resize, CenterCrop."""

    def crop(width: int, height: int) -> Crop:
        size = _scaled(width, height, short_side, side)
        at = round((size[0] - side) / 2), round((size[1] - side) / 2)
        return Crop(box=(0, 0, width, height), size=size, at=at, side=side)

    return crop


def _scaled(width: int, height: int, short_side: int, side: int) -> tuple[int, int]:
    """The image's size with that short side, or with `side` where that is larger."""
    short = min(width, height)
    return max(side, int(short_side * width / short)), max(side, int(short_side * height / short))


def random_box(width: int, height: int, rng: Random, *, min_area: float, max_aspect: float) -> Box:
    """A box inside the image: area uniform in [min_area, 1] of the image's, aspect ratio log-uniform, place uniform."""
    log_aspect = math.log(max_aspect)
    for _ in range(CROP_TRIES):
        area = width * height * rng.uniform(min_area, 1)
        aspect = math.exp(rng.uniform(-log_aspect, log_aspect))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return rng.randrange(width - w + 1), rng.randrange(height - h + 1), w, h
    w, h = min(width, round(height * max_aspect)), min(height, round(width * max_aspect))
    return (width - w) // 2, (height - h) // 2, w, h
