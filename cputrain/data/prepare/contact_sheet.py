"""A contact sheet: the first images of a split, each with the name of its class."""

from collections.abc import Callable
from math import ceil
from random import Random

import numpy as np
from PIL import Image, ImageDraw

from cputrain.data.formats.dataset import Images
from cputrain.data.order.permutations import image_rng
from cputrain.data.pixels.decode import Decode, Pixels
from cputrain.data.pixels.transform import Transform

SIDE, LINE, GAP = 128, 14, 6  # pixels
MOST_SIDE = 256
GRAY = 200
PLAIN = Transform(image_size=SIDE, short_side=SIDE)

Squares = Callable[[int], tuple[Pixels, str | None]]
"""The number of an image -> its square, (side, side, 3), and what is wrong with it."""


def transformed(images: Images, decode: Decode, transform: Transform, *, seed: int = 1, epoch: int = 0) -> Squares:
    """The squares that a transform makes of images; as in a training with this seed, in this epoch, counted from 0."""

    def square(i: int) -> tuple[Pixels, str | None]:
        pixels = np.empty((1, transform.image_size, transform.image_size, 3), dtype=np.uint8)

        def rng(image: int, stream: int) -> Random:
            return image_rng(seed, epoch, image, stream)

        try:
            problems = decode([images.read(i)], [transform.crop_of(i, rng)], pixels)
        except OSError as error:
            problems = [str(error)]
        transform.augment([i], pixels, problems, rng)
        return pixels[0], problems[0]

    return square


def contact_sheet(
    images: Images, classes: tuple[str, ...], squares: Squares, *, count: int, side: int = SIDE, columns: int = 8
) -> Image.Image:
    """The squares of the first `count` images, in rows, each `side` pixels wide or MOST_SIDE at most; a damaged image
    is a gray square."""
    shown = min(count, len(images))
    labels = images.labels
    side = min(side, MOST_SIDE)
    width, height = side + GAP, side + LINE + GAP
    sheet = Image.new("RGB", (columns * width + GAP, ceil(shown / columns) * height + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for i in range(shown):
        left, top = GAP + i % columns * width, GAP + i // columns * height
        pixels, problem = squares(i)
        if problem:
            pixels[:] = GRAY
            draw.text((left + 4, top + side + 1), "damaged", fill="red")
        sheet.paste(Image.fromarray(pixels).resize((side, side)), (left, top))
        draw.text((left, top + side + 1), classes[int(labels[i])][: side // 6], fill="black")
    return sheet
