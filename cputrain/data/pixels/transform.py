"""What is done to each image of a split: its crop, and its augmentation, both random by seed, epoch and image."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from cputrain.data.pixels.augment import Augmentation, augment
from cputrain.data.pixels.crops import CropFunction, center_crop, random_crop, random_resized_crop
from cputrain.data.pixels.decode import Pixels

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
