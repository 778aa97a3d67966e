"""What is done to an image before the network sees it: crop, flip, color, RandAugment."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from cputrain.data.order import image_rng
from cputrain.data.pixels.decode import Crop, Crops, Pixels

# ImageNet's principal components of red, green, blue (0 to 1) and their standard deviations, as Krizhevsky et al. 2012,
# 4.1 have them used; the figures are those of fb.resnet.torch and of Intel Caffe's data layers.
DEVIATIONS = np.array([0.2175, 0.0188, 0.0045])
COMPONENTS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
FILL = (124, 116, 104)  # ImageNet's mean: the color of what lies outside the image


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """How far a training image may be changed at random; 0 leaves a property as it is.

    `rotate`: by up to this share of a full turn, either way. `zoom`: scaled by a factor of 1 +- zoom. `shift`: moved by
    up to this share of the side in x and y. `brightness`, `contrast`, `saturation`: multiplied by a factor of 1 +- the
    value. `lighting`: standard deviation of the noise along ImageNet's principal colors (AlexNet: 0.1). `randaugment`:
    how many of RandAugment's operations, of strength `randaugment_magnitude` (0 to 30), are applied after that.
    """

    rotate: float = 0.0
    zoom: float = 0.0
    shift: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    lighting: float = 0.0
    randaugment: int = 0
    randaugment_magnitude: int = 9

    def __bool__(self) -> bool:
        """Whether any property is changed."""
        return any(astuple(replace(self, randaugment_magnitude=0)))


def augment(pixels: NDArray[np.uint8], augmentation: Augmentation, rng: Random) -> None:
    """Change (side, side, 3) bytes in place: rotate, zoom and shift; brightness, contrast and saturation; lighting;
    RandAugment."""
    image = Image.fromarray(pixels)
    if augmentation.rotate or augmentation.zoom or augmentation.shift:
        image = _moved(image, augmentation, rng)
    for enhance, most in (
        (ImageEnhance.Brightness, augmentation.brightness),
        (ImageEnhance.Contrast, augmentation.contrast),
        (ImageEnhance.Color, augmentation.saturation),
    ):
        if most:
            image = enhance(image).enhance(rng.uniform(1 - most, 1 + most))
    if augmentation.lighting:
        light = 255 * COMPONENTS @ ([rng.gauss(0, augmentation.lighting) for _ in range(3)] * DEVIATIONS)
        pixels[:] = np.clip(np.rint(np.asarray(image) + light), 0, 255)
    else:
        pixels[:] = np.asarray(image)
    if augmentation.randaugment:
        randaugment(pixels, augmentation.randaugment, augmentation.randaugment_magnitude, rng)


def _moved(image: Image.Image, augmentation: Augmentation, rng: Random) -> Image.Image:
    """The image rotated about its center, scaled and moved, bilinear.

    Pillow takes the inverse transform, from new places to old ones.
    """
    angle = 2 * math.pi * rng.uniform(-augmentation.rotate, augmentation.rotate)
    scale = rng.uniform(1 - augmentation.zoom, 1 + augmentation.zoom)
    dx, dy = (image.width * rng.uniform(-augmentation.shift, augmentation.shift) for _ in range(2))
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    x, y = image.width / 2, image.height / 2
    left, top = x - cos * (x + dx) - sin * (y + dy), y + sin * (x + dx) - cos * (y + dy)
    inverse = (cos, sin, left, -sin, cos, top)
    return image.transform(image.size, Image.Transform.AFFINE, inverse, Image.Resampling.BILINEAR, fillcolor=FILL)


MOST = 31  # strengths of RandAugment, of which 0 to 30 are used


def randaugment(pixels: NDArray[np.uint8], operations: int, magnitude: int, rng: Random) -> None:
    """Apply that many of RandAugment's operations (Cubuk et al. 2020) of strength `magnitude` (0 to 30) to (side, side,
    3) bytes, in place.

    torchvision's own transform draws from torch's global generator, which the threads of a loader share: a training
    that is resumed would see other images.
    """
    transform = _torchvision_randaugment()
    image = Image.fromarray(pixels)
    for _ in range(operations):
        name = rng.choice(sorted(transform._AUGMENTATION_SPACE))
        strengths, signed = transform._AUGMENTATION_SPACE[name]
        values = strengths(MOST, *pixels.shape[:2])
        value = 0.0 if values is None else float(values[magnitude])
        if signed and rng.random() < 0.5:
            value = -value
        image = transform._apply_image_or_video_transform(
            image, name, value, interpolation=transform.interpolation, fill=transform._fill
        )
    pixels[:] = np.asarray(image)


@lru_cache
def _torchvision_randaugment() -> Any:
    from cputrain.models.vision import import_torchvision  # torch: only where it is used

    return import_torchvision("transforms.v2").RandAugment(fill=list(FILL))


NONE = Augmentation()
CROP, AUGMENT = 0, 1  # independent random streams of an image
CROP_TRIES = 10  # Szegedy et al. 2014 by way of torchvision: then the largest allowed center crop


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """How an image becomes a square of image_size x image_size pixels.

    `crop`: "random_resized" (a box of random area and aspect ratio, scaled; Szegedy et al. 2014), "random" (a square at
    a random place of the image whose short side is scaled to `short_side`, or to `image_size` where that is larger;
    Krizhevsky et al. 2012) or "center" (the middle of that image, never mirrored).
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
        """The crops of the images with these numbers, as a training with this seed has them in this epoch, from 0;
        center crops depend on none of them."""

        def crop(place: int, width: int, height: int) -> Crop:
            side = self.image_size
            if self.crop == "random_resized":
                rng = image_rng(seed, epoch, numbers[place], CROP)
                box = random_box(width, height, rng, min_area=self.min_area, max_aspect=self.max_aspect)
                return Crop(*box, side, side, 0, 0, side, self.flip and rng.random() < 0.5)
            short = min(width, height)
            w, h = (max(side, int(self.short_side * length / short)) for length in (width, height))
            if self.crop == "center":
                return Crop(0, 0, width, height, w, h, round((w - side) / 2), round((h - side) / 2), side)
            rng = image_rng(seed, epoch, numbers[place], CROP)
            x, y = rng.randrange(w - side + 1), rng.randrange(h - side + 1)
            return Crop(0, 0, width, height, w, h, x, y, side, self.flip and rng.random() < 0.5)

        return crop

    def augment(
        self, numbers: Sequence[int], pixels: Pixels, problems: Sequence[str | None], seed: int, epoch: int
    ) -> None:
        """Augment (n, image_size, image_size, 3) pixels in place, except those of images that have a problem."""
        if self.augmentation:
            for number, square, problem in zip(numbers, pixels, problems, strict=True):
                if problem is None:
                    augment(square, self.augmentation, image_rng(seed, epoch, number, AUGMENT))


def center_crop(short_side: int, side: int) -> Crops:
    """The center squares of images whose short side is scaled to `short_side`: torchvision's Resize, CenterCrop."""
    return Transform(image_size=side, short_side=short_side).crops()


def random_box(
    width: int, height: int, rng: Random, *, min_area: float, max_aspect: float
) -> tuple[int, int, int, int]:
    """Left, top, width and height of a part of an image: area uniform in [min_area, 1] of the image's, aspect ratio
    log-uniform, place uniform."""
    log_aspect = math.log(max_aspect)
    for _ in range(CROP_TRIES):
        area = width * height * rng.uniform(min_area, 1)
        aspect = math.exp(rng.uniform(-log_aspect, log_aspect))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return rng.randrange(width - w + 1), rng.randrange(height - h + 1), w, h
    w, h = min(width, round(height * max_aspect)), min(height, round(width * max_aspect))
    return (width - w) // 2, (height - h) // 2, w, h
