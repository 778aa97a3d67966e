"""Which pixels of an image the network sees: pure functions of its size."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

CROP_TRIES = 10  # Szegedy et al. 2014 by way of torchvision: then the largest allowed centre crop


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The part `box` (left, top, width, height) of an image, scaled to `size` (width, height), of that the square of
    `side` pixels whose corner is `at` (x, y); mirrored with `flip`. All in pixels."""

    box: tuple[int, int, int, int]
    size: tuple[int, int]
    at: tuple[int, int]
    side: int
    flip: bool = False


Look = Callable[[int, int], View]
"""What is wanted of an image of this width and height."""


Draw = Callable[[], Random]
"""A source of random numbers that begins anew each time: an image that is looked at twice is seen the same."""


def training_look(crop: int, draw: Draw, *, min_area: float, max_aspect: float, flip: bool) -> Look:
    """A random part of the image, scaled to crop x crop, perhaps mirrored (Szegedy et al. 2014)."""

    def look(width: int, height: int) -> View:
        rng = draw()
        box = random_box(width, height, rng, min_area=min_area, max_aspect=max_aspect)
        return View(box=box, size=(crop, crop), at=(0, 0), side=crop, flip=flip and rng.random() < 0.5)

    return look


def plain_look(resize: int, crop: int, draw: Draw, *, flip: bool) -> Look:
    """A square of crop x crop anywhere in the image after its short side is scaled to `resize`, perhaps mirrored
    (Krizhevsky et al. 2012)."""

    def look(width: int, height: int) -> View:
        rng = draw()
        size = _scaled(width, height, resize, crop)
        at = rng.randrange(size[0] - crop + 1), rng.randrange(size[1] - crop + 1)
        box = (0, 0, width, height)
        return View(box=box, size=size, at=at, side=crop, flip=flip and rng.random() < 0.5)

    return look


def evaluation_look(resize: int, crop: int) -> Look:
    """The centre crop x crop of the image after its short side is scaled to `resize`."""

    def look(width: int, height: int) -> View:
        size = _scaled(width, height, resize, crop)
        at = round((size[0] - crop) / 2), round((size[1] - crop) / 2)
        return View(box=(0, 0, width, height), size=size, at=at, side=crop)

    return look


def _scaled(width: int, height: int, resize: int, crop: int) -> tuple[int, int]:
    """The size whose short side is `resize`, or crop where that is larger."""
    short = min(width, height)
    return max(crop, int(resize * width / short)), max(crop, int(resize * height / short))


def random_box(
    width: int, height: int, rng: Random, *, min_area: float, max_aspect: float
) -> tuple[int, int, int, int]:
    """Left, top, width and height of a part: area uniform in [min_area, 1] of it all, log-uniform aspect, uniform
    place."""
    log_aspect = math.log(max_aspect)
    for _ in range(CROP_TRIES):
        area = width * height * rng.uniform(min_area, 1)
        aspect = math.exp(rng.uniform(-log_aspect, log_aspect))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return rng.randrange(width - w + 1), rng.randrange(height - h + 1), w, h
    w, h = min(width, round(height * max_aspect)), min(height, round(width * max_aspect))
    return (width - w) // 2, (height - h) // 2, w, h
