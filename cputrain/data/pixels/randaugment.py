"""RandAugment (Cubuk et al. 2020): torchvision's operations, drawn by a random number generator of the image.

torchvision's own transform draws from torch's global generator, which the threads of a loader share: a training that is
resumed would see other images.
"""

from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cputrain.models.vision import import_torchvision

MOST = 31  # strengths, of which 0 to 30 are used


def randaugment(
    pixels: NDArray[np.uint8], operations: int, magnitude: int, fill: tuple[int, int, int], rng: Random
) -> None:
    """Apply that many operations of strength `magnitude` (0 to 30) to (side, side, 3) bytes, in place; `fill` is the
    color of what comes from outside the image."""
    transform = _transform(fill)
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
def _transform(fill: tuple[int, int, int]) -> Any:
    return import_torchvision("transforms.v2").RandAugment(fill=list(fill))
