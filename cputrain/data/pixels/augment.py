"""What is done to a training image: crop, flip, color, RandAugment."""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from random import Random
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from cputrain.data.pixels.crops import CropFunction, center_crop, random_crop, random_resized_crop
from cputrain.data.pixels.decode import Pixels

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
        from cputrain.data.pixels.randaugment import randaugment  # torchvision: only where it is used

        randaugment(pixels, augmentation.randaugment, augmentation.randaugment_magnitude, FILL, rng)


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


NONE = Augmentation()
CROP, AUGMENT = 0, 1  # independent random streams of an image

ImageRng = Callable[[int, int], Random]
"""Image number and stream -> a random number generator in its first state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """How an image becomes a square of image_size x image_size pixels.

    `crop`: "random_resized" (a box of random area and aspect ratio, scaled), "random" (a square at a random place of
    the image whose short side is scaled to `short_side`) or "center" (the middle of that image, never mirrored).
    `min_area` and `max_aspect` bound the random boxes; `flip` mirrors half of the random crops.
    """

    image_size: int
    short_side: int
    crop: Literal["random_resized", "random", "center"] = "center"
    min_area: float = 0.08
    max_aspect: float = 4 / 3
    flip: bool = True
    augmentation: Augmentation = NONE

    def crop_of(self, image: int, rng: ImageRng) -> CropFunction:
        """The crop function of an image."""
        if self.crop == "center":
            return center_crop(self.short_side, self.image_size)

        def make_rng() -> Random:
            return rng(image, CROP)

        if self.crop == "random":
            return random_crop(self.short_side, self.image_size, make_rng, flip=self.flip)
        return random_resized_crop(
            self.image_size, make_rng, min_area=self.min_area, max_aspect=self.max_aspect, flip=self.flip
        )

    def augment(self, images: Sequence[int], pixels: Pixels, problems: Sequence[str | None], rng: ImageRng) -> None:
        """Augment (n, image_size, image_size, 3) pixels in place, except those of images that have a problem."""
        if self.augmentation:
            for image, square, problem in zip(images, pixels, problems, strict=True):
                if problem is None:
                    augment(square, self.augmentation, rng(image, AUGMENT))
