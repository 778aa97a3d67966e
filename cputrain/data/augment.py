"""What is done to a training image's pixels after decoding. Costs nothing where the recipe asks for nothing."""

import math
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from cputrain.recipe.schema import AugmentSection

# ImageNet's principal components of red, green, blue (0 to 1) and their standard deviations, as Krizhevsky et al. 2012,
# 4.1 have them used; the figures are those of fb.resnet.torch and of Intel Caffe's data layers.
DEVIATIONS = np.array([0.2175, 0.0188, 0.0045])
COMPONENTS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
GREY = (124, 116, 104)  # ImageNet's mean: what is moved in from outside


def changes(asked: AugmentSection) -> bool:
    """Whether anything is asked for."""
    return any(value != 0 for value in asked.model_dump().values())


def augment(pixels: NDArray[np.uint8], asked: AugmentSection, rng: Random) -> None:
    """Change (side, side, 3) bytes in place: turned, scaled and moved; then brightness, contrast, saturation; then
    lighting."""
    image = Image.fromarray(pixels)
    if asked.rotate or asked.zoom or asked.shift:
        image = _moved(image, asked, rng)
    for enhance, most in (
        (ImageEnhance.Brightness, asked.brightness),
        (ImageEnhance.Contrast, asked.contrast),
        (ImageEnhance.Color, asked.saturation),
    ):
        if most:
            image = enhance(image).enhance(rng.uniform(1 - most, 1 + most))
    if asked.lighting:
        light = 255 * COMPONENTS @ ([rng.gauss(0, asked.lighting) for _ in range(3)] * DEVIATIONS)
        pixels[:] = np.clip(np.rint(np.asarray(image) + light), 0, 255)
    else:
        pixels[:] = np.asarray(image)


def _moved(image: Image.Image, asked: AugmentSection, rng: Random) -> Image.Image:
    """Turned about the centre, scaled and moved, bilinear. PIL wants the way back, from new places to old ones."""
    angle = 2 * math.pi * rng.uniform(-asked.rotate, asked.rotate)
    scale = rng.uniform(1 - asked.zoom, 1 + asked.zoom)
    dx, dy = (image.width * rng.uniform(-asked.shift, asked.shift) for _ in range(2))
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    x, y = image.width / 2, image.height / 2
    left, top = x - cos * (x + dx) - sin * (y + dy), y + sin * (x + dx) - cos * (y + dy)
    way = (cos, sin, left, -sin, cos, top)
    return image.transform(image.size, Image.Transform.AFFINE, way, Image.Resampling.BILINEAR, fillcolor=GREY)
