"""A contact sheet: the first images of a split, each with the name of its class."""

from math import ceil

import numpy as np
from PIL import Image, ImageDraw

from cputrain.data.formats.dataset import Images
from cputrain.data.pixels.crops import center_crop
from cputrain.data.pixels.decode import Decode

SIDE, LINE, GAP = 128, 14, 6  # pixels
GRAY = 200


def contact_sheet(
    images: Images, classes: tuple[str, ...], decode: Decode, *, count: int, columns: int = 8
) -> Image.Image:
    """The center crops of the first `count` images, in rows; a damaged image is a gray square."""
    shown = min(count, len(images))
    labels = images.labels
    width, height = SIDE + GAP, SIDE + LINE + GAP
    sheet = Image.new("RGB", (columns * width + GAP, ceil(shown / columns) * height + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for i in range(shown):
        left, top = GAP + i % columns * width, GAP + i // columns * height
        pixels = np.empty((1, SIDE, SIDE, 3), dtype=np.uint8)
        try:
            (problem,) = decode([images.read(i)], [center_crop(SIDE, SIDE)], pixels)
        except OSError as error:
            problem = str(error)
        if problem:
            pixels[:] = GRAY
            draw.text((left + 4, top + SIDE + 1), "damaged", fill="red")
        sheet.paste(Image.fromarray(pixels[0]), (left, top))
        draw.text((left, top + SIDE + 1), classes[int(labels[i])][:20], fill="black")
    return sheet
