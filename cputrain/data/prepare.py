"""`cputrain prepare`: pack images of any source into shuffled shards with an index; check and show prepared data."""

import io
import json
import os
import shutil
import tarfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageDraw

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import write_with
from cputrain.affinity.wording import first_named
from cputrain.data.formats.dataset import Dataset, Images
from cputrain.data.formats.records import (
    HEAD,
    encode_example,
    member_problem,
    record_of,
    record_problem,
    tar_end,
    tar_member,
)
from cputrain.data.formats.shards import RECORD, Shards, crc32c, index_path, shard_format_of, shard_paths
from cputrain.data.formats.source import MANIFEST, read_data_manifest, write_manifest
from cputrain.data.order import Indices, epoch_order, expected_classes_in_window, mean_classes_in_window
from cputrain.data.pixels import DAMAGE, Decode, Pixels, Transform, bytes_of_pixels, cause_of, open_image
from cputrain.files import write_text

SHARD_BYTES = 256 << 20

CONVERTED_JPEG_QUALITY = 100  # the JPEG quality to which TensorFlow's ImageNet scripts convert PNG and CMYK files
JPEG_END = b"\xff\xd9"
EXIF_ORIENTATION = 0x0112
JPEG_START = b"\xff\xd8\xff"  # of MPO files, too: photos followed by a preview or a second picture
SUFFIXES = {"TIFF": ".tif", "JPEG2000": ".jp2"}  # for other formats: the format's name

OVERHEAD = 2048  # bytes per sample of a tar besides its image: two headers, padding, the label; fewer in a TFRecord
SAMPLED = 64  # images to re-encode for an estimate of the shards' size
OPTIONS = "options.json"
AHEAD = 256  # images that threads encode ahead

SIDE, LINE, GAP = 128, 14, 6  # pixels
MAX_SIDE, COLUMNS = 256, 8
GRAY = 200
PLAIN = Transform(image_size=SIDE, short_side=SIDE)

Squares = Callable[[int], tuple[Pixels, str | None]]
"""Image number -> its square, (side, side, 3), and its error or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of packing a data set.

    `quality` is the quality of re-encoded JPEGs; None keeps the files unchanged (but TFRecords get only gray and RGB
    JPEGs).
    """

    kind: str
    source: str
    seed: int = 1
    shard_bytes: int = SHARD_BYTES
    shards: int | None = None
    val_fraction: float | None = None
    test_fraction: float | None = None
    label_column: str | None = None
    short_side: int | None = None
    quality: int | None = None
    format: str = "tar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Image as stored in a shard: its bytes, the suffix of its actual format, width and height in pixels.

    `unusual` lists its unusual properties: "gray", "16 bits", "cmyk", "no jpeg", "exif rotation" (ignored, as in
    torchvision), "no end marker".
    """

    data: bytes
    suffix: str
    width: int
    height: int
    unusual: tuple[str, ...]


class ImageError(Exception):
    """The image cannot be decoded; the message is the cause."""


def encode_image(data: bytes, *, short_side: int | None, quality: int | None, jpeg_only: bool) -> Encoded:
    """Return the image for a shard: unchanged if quality is None, else a JPEG of that quality and at most short_side.

    With `jpeg_only`, images other than gray or RGB JPEGs are converted even if quality is None. Raises ImageError.
    """
    if quality is not None:
        return reencode_image(data, short_side=short_side, quality=quality)
    image = inspect(data)
    if jpeg_only and {"no jpeg", "cmyk"} & {*image.unusual}:
        return reencode_image(data, short_side=None, quality=CONVERTED_JPEG_QUALITY)
    return image


def inspect(data: bytes) -> Encoded:
    """Return the image unchanged. It is decoded only if it is not a JPEG or lacks its end marker. Raises ImageError."""
    try:
        with open_image(data, load=False) as image:
            unusual = _unusual_properties(image, data)
            if "no end marker" in unusual or "no jpeg" in unusual:
                bytes_of_pixels(open_image(data))
            name = image.format or ""
            suffix = SUFFIXES.get(name, f".{name.lower()}") if "no jpeg" in unusual else ".jpg"
            return Encoded(data=data, suffix=suffix, width=image.width, height=image.height, unusual=unusual)
    except DAMAGE as error:
        raise ImageError(cause_of(data, error)) from None


def reencode_image(data: bytes, *, short_side: int | None, quality: int) -> Encoded:
    """Return the image as a JPEG (4:2:0, or gray if it is gray), its short side at most `short_side`. Raises
    ImageError."""
    try:
        with open_image(data) as image:
            unusual = _unusual_properties(image, data)
            pixels = bytes_of_pixels(image)
            short = min(pixels.size)
            if short_side is not None and short > short_side:
                size = (round(pixels.width * short_side / short), round(pixels.height * short_side / short))
                pixels = pixels.resize(size, Image.Resampling.BICUBIC)
            out = io.BytesIO()
            # Optimized tables make the files 4 % smaller. A restart marker after each row of blocks makes them 1 %
            # larger, but lets the decoder skip the rows above a crop.
            pixels.save(out, "JPEG", quality=quality, subsampling="4:2:0", optimize=True, restart_marker_rows=1)
    except DAMAGE as error:
        raise ImageError(cause_of(data, error)) from None
    return Encoded(data=out.getvalue(), suffix=".jpg", width=pixels.width, height=pixels.height, unusual=unusual)


def _unusual_properties(image: Image.Image, data: bytes) -> tuple[str, ...]:
    is_jpeg = data.startswith(JPEG_START)
    images = {
        "no jpeg": not is_jpeg,
        "gray": image.mode in ("L", "LA", "1") or image.mode.startswith("I"),
        "16 bits": image.mode.startswith("I"),
        "cmyk": image.mode == "CMYK",
        "exif rotation": _orientation(image) not in (0, 1),
        "no end marker": is_jpeg and not data.endswith(JPEG_END),
    }
    return tuple(name for name, is_so in images.items() if is_so)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation; 0 if it is missing or cannot be read."""
    try:
        value = image.getexif().get(EXIF_ORIENTATION, 0)
    except DAMAGE:
        return 0
    return value if isinstance(value, int) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Image to write, with its class and its name in the source; `label` counts from 0."""

    image: Encoded
    label: int
    class_name: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFormat:
    """Layout of the samples in a shard.

    `pack`: (number of the sample in its split, sample) -> its bytes, and the offset of the image in them.
    `end`: total length of the samples -> the bytes that follow the last one. `problem`: (file, number of the sample,
    offset and length of its image, end of the previous image or 0) -> what is wrong around the image, or None.
    """

    pack: Callable[[int, Sample], tuple[bytes, int]]
    end: Callable[[int], bytes]
    problem: Callable[[BinaryIO, int, int, int, int], str | None]


def _pack_members(key: int, sample: Sample) -> tuple[bytes, int]:
    image, label = sample.image, str(sample.label).encode()
    return tar_member(f"{key:08d}{image.suffix}", image.data) + tar_member(f"{key:08d}.cls", label), tarfile.BLOCKSIZE


def _pack_record(_key: int, sample: Sample) -> tuple[bytes, int]:
    image, file_name = sample.image, sample.name.rpartition("/")[2]
    example = encode_example(
        image.data, image.width, image.height, sample.label, class_name=sample.class_name, file_name=file_name
    )
    return record_of(example), HEAD + len(example) - len(image.data)


SHARD_FORMATS = {
    "tar": ShardFormat(pack=_pack_members, end=tar_end, problem=member_problem),
    "tfrecord": ShardFormat(pack=_pack_record, end=lambda _size: b"", problem=record_problem),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitToPack:
    """A split to pack."""

    name: str
    images: Images
    labels: Indices
    classes: tuple[str, ...]
    options: Options


def pack_dataset(
    dataset: Dataset,
    out: Path,
    options: Options,
    *,
    threads: int | None = None,
    on_image: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Pack each split into shards in random order; skip images that cannot be read and list them in the manifest.

    `out` is complete or absent. Unfinished work is kept next to it, in .OUT.partial, and resumed by a call with the
    same options; a complete `out` with the same options is left unchanged. `on_image` is called after each image.
    Returns the manifest's splits. Raises InputError if `out` is anything else, or the disk is too small.
    """
    requested = asdict(options)
    if is_begun(out):
        manifest = _manifest_of(out)
        made_with = {**asdict(Options(kind="", source="")), **manifest["options"]}
        if changed := [
            f"{key}: {made_with.get(key)} -> {value}" for key, value in requested.items() if made_with.get(key) != value
        ]:
            raise InputError(
                f"{out} was prepared with other options ({', '.join(changed)}): prepare into another folder, or remove "
                "this one first"
            )
        complete: dict[str, dict[str, Any]] = manifest["splits"]
        return complete
    splits = [
        SplitToPack(name=name, images=images, labels=images.labels, classes=dataset.classes, options=options)
        for name, images in dataset.splits.items()
    ]
    factor = _size_factor(splits[0])
    partial_out = _unfinished(out, requested)
    _check_space(partial_out, sum(_bytes(split.images) for split in splits) * factor)
    entries: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)), thread_name_prefix="prepare") as pool:
        for split in splits:
            entries[split.name] = _write_split(pool, partial_out, split, factor, on_image)
    write_manifest(partial_out, dataset.classes, requested, entries)
    (partial_out / OPTIONS).unlink()
    partial_out.rename(out)
    return entries


def is_begun(out: Path) -> bool:
    """Return whether a path is anything but missing or an empty folder."""
    return out.exists() and not (out.is_dir() and next(out.iterdir(), None) is None)


def _manifest_of(out: Path) -> dict[str, Any]:
    """Return the manifest of a prepared folder. Raises InputError for anything else that is there."""
    if not out.is_dir():
        raise InputError(f"{out} is a file: prepare into a new folder")
    if not (out / MANIFEST).is_file() or not any(out.glob("*.index.npy")):
        names = first_named(sorted(path.name for path in out.iterdir()))
        raise InputError(f"{out} has other files, {names}: prepare into a new folder")
    return read_data_manifest(out)


def _unfinished(out: Path, requested: dict[str, Any]) -> Path:
    """Return the folder .OUT.partial, emptied if it was begun with other options."""
    partial_out = out.with_name(f".{out.name}.partial")
    try:
        begun_with = json.loads((partial_out / OPTIONS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        begun_with = None
    if begun_with != requested:
        shutil.rmtree(partial_out, ignore_errors=True)
        write_text(partial_out / OPTIONS, json.dumps(requested))
    return partial_out


def _check_space(folder: Path, needed: float) -> None:
    """Raise InputError if the disk has no room for `needed` bytes, including those already written."""
    written = sum(path.stat().st_size for path in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if needed - written > free:
        raise InputError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, but the shards need about {needed / 1e9:.1f} GB: free some "
            "space, or prepare into another folder"
        )


def _bytes(images: Images) -> int:
    return sum(images.size(i) + OVERHEAD for i in range(len(images)))


def _size_factor(split: SplitToPack) -> float:
    """Estimate the bytes of the shards per byte of the source from a sample of images."""
    images, options = split.images, split.options
    if options.quality is None:
        return 1.0
    before = after = 0
    for i in epoch_order(len(images), options.seed, 0)[:SAMPLED].tolist():
        sample = _sample(split, i)
        if isinstance(sample, Sample):
            before += images.size(i) + OVERHEAD
            after += len(sample.image.data) + OVERHEAD
    return after / before if before else 1.0


def _sample(split: SplitToPack, i: int) -> Sample | str:
    """Return an image for a shard, or a line with its name and why it cannot be read."""
    options, label, name = split.options, int(split.labels[i]), split.images.name(i)
    try:
        image = encode_image(
            split.images.read(i),
            short_side=options.short_side,
            quality=options.quality,
            jpeg_only=options.format == "tfrecord",  # TensorFlow's readers call decode_jpeg
        )
    except (ImageError, OSError) as error:
        return f"{name}: {error}"
    return Sample(image=image, label=label, class_name=split.classes[label], name=name)


def _write_split(
    pool: ThreadPoolExecutor, folder: Path, split: SplitToPack, factor: float, on_image: Callable[[], object]
) -> dict[str, Any]:
    """Write a split's missing shards and its index; return the manifest's entry."""
    options = split.options
    order = epoch_order(len(split.images), options.seed, 0)
    count = options.shards or max(1, round(_bytes(split.images) * factor / options.shard_bytes))
    cuts = [len(order) * number // count for number in range(count + 1)]
    parts = [order[first:last] for first, last in pairwise(cuts) if last > first]
    paths = shard_paths(folder, split.name, len(parts), options.format)
    receipts = [folder / f"{split.name}-{number:05d}.json" for number in range(len(parts))]
    shards, written = [], 0
    for number, (part, path, receipt) in enumerate(zip(parts, paths, receipts, strict=True)):
        if receipt.is_file():
            for _ in part:
                on_image()
        else:
            shard_format, samples = SHARD_FORMATS[options.format], _samples(pool, split, part, on_image)
            _write_shard(path, receipt, number, shard_format, samples, written)
        shards.append(json.loads(receipt.read_text(encoding="utf-8")))
        written += len(shards[-1]["records"])
    records = [tuple(record) for shard in shards for record in shard["records"]]
    if not records:
        for receipt in receipts:
            receipt.unlink()  # so that the images are read again after a repair
        raise InputError(
            f"no image of the {split.name} split can be read, as in {shards[0]['damaged'][0]}: check the source"
        )
    index = np.array(records, dtype=RECORD)
    write_with(index_path(folder, split.name), lambda file: np.save(file, index))
    for receipt in receipts:
        receipt.unlink()
    labels = index["label"].astype(np.int64)
    unusual: Counter[str] = sum((Counter(shard["unusual"]) for shard in shards), Counter())
    return {
        "images": len(index),
        "shards": len(parts),
        "bytes": [path.stat().st_size for path in paths],
        "mixing": {
            "classes_in_32": mean_classes_in_window(labels),
            "at_random": expected_classes_in_window(labels),
        },
        "unusual": dict(unusual),
        "damaged": [line for shard in shards for line in shard["damaged"]],
    }


def _write_shard(
    path: Path, receipt: Path, number: int, shard_format: ShardFormat, samples: Iterator[Sample | str], first_key: int
) -> None:
    """Write a shard, then its receipt: a file with the shard's records that exists only if the shard is complete."""
    unusual: Counter[str] = Counter()
    damaged: list[str] = []
    records: list[tuple[int, ...]] = []  # rows of RECORD

    def write(file: BinaryIO) -> None:
        written = 0
        for sample in samples:
            if isinstance(sample, str):
                damaged.append(sample)
                continue
            image = sample.image
            data, offset = shard_format.pack(first_key + len(records), sample)
            checksum = crc32c(image.data)
            records.append(
                (number, len(image.data), written + offset, sample.label, checksum, image.width, image.height)
            )
            unusual.update(image.unusual)
            file.write(data)
            written += len(data)
        file.write(shard_format.end(written))

    write_with(path, write)
    write_text(receipt, json.dumps({"records": records, "unusual": unusual, "damaged": damaged}))


def _samples(
    pool: ThreadPoolExecutor, split: SplitToPack, part: Indices, on_image: Callable[[], object]
) -> Iterator[Sample | str]:
    """Yield the samples of a shard in order; the threads encode up to AHEAD images ahead."""
    waiting: deque[Future[Sample | str]] = deque()
    for i in part.tolist():
        waiting.append(pool.submit(_sample, split, i))
        if len(waiting) > AHEAD:
            yield waiting.popleft().result()
            on_image()
    while waiting:
        yield waiting.popleft().result()
        on_image()


def sample_problems(folder: Path, split: str) -> Iterator[str | None]:
    """Yield the problem of each sample of a split, or None, in order.

    Raises InputError if the index or a shard is missing or has the wrong size.
    """
    manifest = read_data_manifest(folder)
    shard_format, classes = SHARD_FORMATS[shard_format_of(manifest)], len(manifest["classes"])
    shards = Shards(folder, split)
    for number, path in enumerate(shards.paths):
        with path.open("rb") as file:
            end = 0
            for i in np.flatnonzero(shards.index["shard"] == number).tolist():
                record = shards.index[i]
                offset, length, label = (int(record[key]) for key in ("offset", "length", "label"))
                file.seek(offset)
                if crc32c(file.read(length)) != record["crc32c"]:
                    problem: str | None = "the image's checksum differs from the index"
                elif label >= classes:
                    problem = f"label {label}, but there are {classes} classes"
                else:
                    problem = shard_format.problem(file, i, offset, length, end)
                yield f"{shards.name(i)}, byte {offset:,}: {problem}" if problem else None
                end = offset + length


def transformed_squares(
    images: Images, decode: Decode, transform: Transform, *, seed: int = 1, epoch: int = 0
) -> Squares:
    """Return the squares that a transform makes in a training with this seed in this epoch, counted from 0."""

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
    images: Images, classes: tuple[str, ...], squares: Squares, *, count: int, side: int = SIDE
) -> Image.Image:
    """Draw the squares of the first `count` images in rows, each `side` pixels wide but at most MAX_SIDE; a damaged
    image is a gray square."""
    shown = min(count, len(images))
    labels = images.labels
    side = min(side, MAX_SIDE)
    width, height = side + GAP, side + LINE + GAP
    sheet = Image.new("RGB", (COLUMNS * width + GAP, ceil(shown / COLUMNS) * height + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for i in range(shown):
        x_left, top = GAP + i % COLUMNS * width, GAP + i // COLUMNS * height
        pixels, problem = squares(i)
        if problem:
            pixels[:] = GRAY
            draw.text((x_left + 4, top + side + 1), "damaged", fill="red")
        sheet.paste(Image.fromarray(pixels).resize((side, side)), (x_left, top))
        draw.text((x_left, top + side + 1), classes[int(labels[i])][: side // 6], fill="black")
    return sheet
