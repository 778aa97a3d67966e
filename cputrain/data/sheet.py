"""A contact sheet: what the first images of a split look like, each under its class's name."""

import os
from math import ceil

import numpy as np
from PIL import Image, ImageDraw

from cputrain.data.decode import choose_decoder
from cputrain.data.images import Images
from cputrain.data.views import evaluation_look

SIDE, LINE, GAP = 128, 14, 6
GREY = 200


def contact_sheet(images: Images, classes: tuple[str, ...], count: int, columns: int = 8) -> Image.Image:
    """The first `count` images, as evaluation sees them, in rows; a damaged one is a grey square."""
    decode, _ = choose_decoder("auto", os.environ)
    shown = min(count, len(images))
    labels = images.labels
    width, height = SIDE + GAP, SIDE + LINE + GAP
    sheet = Image.new("RGB", (columns * width + GAP, ceil(shown / columns) * height + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for i in range(shown):
        left, top = GAP + i % columns * width, GAP + i // columns * height
        pixels = np.empty((1, SIDE, SIDE, 3), dtype=np.uint8)
        try:
            (problem,) = decode([images.read(i)], [evaluation_look(SIDE, SIDE)], pixels)
        except OSError as error:
            problem = str(error)
        if problem:
            pixels[:] = GREY
            draw.text((left + 4, top + SIDE + 1), "damaged", fill="red")
        sheet.paste(Image.fromarray(pixels[0]), (left, top))
        draw.text((left, top + SIDE + 1), classes[int(labels[i])][:20], fill="black")
    return sheet
