"""Check a prepared data set, and draw a sheet of its images."""

import tarfile
from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageDraw

from cputrain.data.formats.dataset import Images
from cputrain.data.formats.places import read_manifest
from cputrain.data.formats.shards import Shards, crc32c, shard_format_of
from cputrain.data.formats.tfrecord import HEAD, TAIL, masked
from cputrain.data.pixels.decode import Decode, Pixels
from cputrain.data.pixels.transform import Transform


def problems(folder: Path, split: str) -> Iterator[str | None]:
    """The problem of each sample of a split, in order, or None.

    Raises InputError where the index or a shard is missing or has another size.
    """
    manifest = read_manifest(folder)
    check_container = {"tar": _in_archive, "tfrecord": _in_records}[shard_format_of(manifest)]
    shards = Shards(folder, split)
    for number, path in enumerate(shards.paths):
        mine = np.flatnonzero(shards.index["shard"] == number)
        with path.open("rb") as file:
            end = 0
            for i in mine.tolist():
                yield _image_problem(file, shards, i, len(manifest["classes"])) or check_container(file, shards, i, end)
                end = int(shards.index[i]["offset"]) + int(shards.index[i]["length"])


def _image_problem(file: BinaryIO, shards: Shards, i: int, classes: int) -> str | None:
    """The problem of the image's bytes or its label."""
    offset, length, label = (int(shards.index[i][key]) for key in ("offset", "length", "label"))
    file.seek(offset)
    if crc32c(file.read(length)) != int(shards.index[i]["crc32c"]):
        return f"{_place(shards, i)}: the image's checksum differs from the index"
    return f"{_place(shards, i)}: label {label}, but there are {classes} classes" if label >= classes else None


def _in_archive(file: BinaryIO, shards: Shards, i: int, _end: int) -> str | None:
    """The problem of the tar header before the image."""
    file.seek(int(shards.index[i]["offset"]) - tarfile.BLOCKSIZE)
    try:
        member = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), tarfile.ENCODING, "surrogateescape")
    except tarfile.HeaderError as error:
        return f"{_place(shards, i)}: the archive is damaged before it: {error}"
    if member.size != int(shards.index[i]["length"]) or not member.name.startswith(f"{i:08d}."):
        return f"{_place(shards, i)}: the archive has {member.name}, {member.size:,} bytes, in its place"
    return None


def _in_records(file: BinaryIO, shards: Shards, i: int, end: int) -> str | None:
    """The problem of the record around the image, which is its last field; the image before ends at byte `end`."""
    start = end + TAIL if end else 0
    file.seek(start)
    head = file.read(HEAD)
    length = int(shards.index[i]["offset"]) + int(shards.index[i]["length"]) - start - HEAD
    data, tail = file.read(length), file.read(TAIL)
    if int.from_bytes(head[:8], "little") != length or masked(head[:8]) != int.from_bytes(head[8:], "little"):
        return f"{_place(shards, i)}: the record's length at byte {start:,} is damaged"
    if masked(data) != int.from_bytes(tail, "little"):
        return f"{_place(shards, i)}: the record at byte {start:,} is damaged outside the image"
    return None


def _place(shards: Shards, i: int) -> str:
    return f"{shards.name(i)}, byte {int(shards.index[i]['offset']):,}"


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

        try:
            problems = decode([images.read(i)], transform.crops([i], seed, epoch), pixels)
        except OSError as error:
            problems = [str(error)]
        transform.augment([i], pixels, problems, seed, epoch)
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
