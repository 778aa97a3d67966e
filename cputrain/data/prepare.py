"""`cputrain prepare`: images of any source -> shuffled shards with an index; and checking and showing prepared data."""

import io
import json
import os
import shutil
import struct
import tarfile
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from PIL import Image, ImageDraw

from cputrain.affinity.errors import InputError
from cputrain.data.formats.dataset import Dataset, Images
from cputrain.data.formats.shards import RECORD, Shards, crc32c, index_path, shard_format_of, shard_paths
from cputrain.data.formats.source import MANIFEST, read_manifest, write_manifest
from cputrain.data.formats.tfrecord import FIRST_LABEL, HEAD, IMAGE, LABEL, LENGTH, SYNSET_NAME, TAIL, TEXT, masked
from cputrain.data.order import Indices, epoch_order, expected_classes_in_window, mean_classes_in_window
from cputrain.data.pixels import DAMAGE, Decode, ImageError, Pixels, Transform, bytes_of_pixels
from cputrain.data.sources import SYNSET
from cputrain.files import write_text, write_with

SHARD_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a data set is packed.

    `quality` is that of JPEGs written anew; None keeps the files as they are (but TFRecords get only gray and RGB
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


NEARLY_LOSSLESS = 100  # the JPEG quality that TensorFlow's ImageNet scripts convert PNG and CMYK files with
JPEG_END = b"\xff\xd9"
EXIF_ORIENTATION = 0x0112
JPEG_START = b"\xff\xd8\xff"  # also of what Pillow calls MPO: photos with a preview or a second picture behind them
SUFFIXES = {"TIFF": ".tif", "JPEG2000": ".jp2"}  # others are the format's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """An image as it is stored in a shard: its bytes, the suffix of its real format, width and height in pixels.

    `unusual` lists properties: "gray", "16 bits", "cmyk", "no jpeg", "exif rotation" (ignored, as torchvision does),
    "no end marker".
    """

    data: bytes
    suffix: str
    width: int
    height: int
    unusual: tuple[str, ...]


def encode(data: bytes, *, short_side: int | None, quality: int | None, jpeg_only: bool) -> Encoded:
    """The image for a shard: unchanged with quality None, else a JPEG of that quality and at most that short side.

    With `jpeg_only` images that are not gray or RGB JPEGs are converted even with quality None. Raises ImageError.
    """
    if quality is not None:
        return reencode(data, short_side=short_side, quality=quality)
    image = inspect(data)
    if jpeg_only and {"no jpeg", "cmyk"} & {*image.unusual}:
        return reencode(data, short_side=None, quality=NEARLY_LOSSLESS)
    return image


def inspect(data: bytes) -> Encoded:
    """The image unchanged. It is decoded only where its end marker is missing or it is no JPEG. Raises ImageError."""
    try:
        with _open(data) as image:
            unusual = _oddities(image, data)
            if "no end marker" in unusual or "no jpeg" in unusual:
                bytes_of_pixels(image).load()
            name = image.format or ""
            suffix = SUFFIXES.get(name, f".{name.lower()}") if "no jpeg" in unusual else ".jpg"
            return Encoded(data=data, suffix=suffix, width=image.width, height=image.height, unusual=unusual)
    except DAMAGE as error:
        raise ImageError(str(error)) from None


def reencode(data: bytes, *, short_side: int | None, quality: int) -> Encoded:
    """The image as a JPEG (4:2:0, or gray if it is gray), its short side at most `short_side`. Raises ImageError."""
    try:
        with _open(data) as image:
            unusual = _oddities(image, data)
            pixels = bytes_of_pixels(image)
            short = min(pixels.size)
            if short_side is not None and short > short_side:
                size = (round(pixels.width * short_side / short), round(pixels.height * short_side / short))
                pixels = pixels.resize(size, Image.Resampling.BICUBIC)
            out = io.BytesIO()
            # Optimized tables: 4 % smaller files for a little time now. A restart marker after each row of blocks: 1 %
            # larger, but a part of the image can be decoded without the rows above it.
            pixels.save(out, "JPEG", quality=quality, subsampling="4:2:0", optimize=True, restart_marker_rows=1)
    except DAMAGE as error:
        raise ImageError(str(error)) from None
    return Encoded(data=out.getvalue(), suffix=".jpg", width=pixels.width, height=pixels.height, unusual=unusual)


def _open(data: bytes) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of unusual metadata; the pixels are what counts
        return Image.open(io.BytesIO(data))


def _oddities(image: Image.Image, data: bytes) -> tuple[str, ...]:
    is_jpeg = data.startswith(JPEG_START)
    found = {
        "no jpeg": not is_jpeg,
        "gray": image.mode in ("L", "LA", "1") or image.mode.startswith("I"),
        "16 bits": image.mode.startswith("I"),
        "cmyk": image.mode == "CMYK",
        "exif rotation": _orientation(image) not in (0, 1),
        "no end marker": is_jpeg and not data.endswith(JPEG_END),
    }
    return tuple(name for name, is_so in found.items() if is_so)


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation; 0 where there is none, or it cannot be read."""
    try:
        value = image.getexif().get(EXIF_ORIENTATION, 0)
    except DAMAGE:
        return 0
    return value if isinstance(value, int) else 0


ShardRecord = tuple[int, int, int, int, int, int, int]
"""A sample's row of the index, in the order of formats.shards.RECORD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An image to write: `key` is its number in the split, `label` counts from 0, `file_name` is its source's."""

    key: int
    image: Encoded
    label: int
    class_name: str
    file_name: str


class ShardWriter(Protocol):
    """Writes one shard; samples are added in order, and `records` are their rows of the index."""

    records: list[ShardRecord]

    def add(self, sample: Sample) -> None:
        """Append a sample."""

    def close(self) -> None:
        """End the shard; the file stays open."""


class TarWriter:
    """A tar archive with two members a sample: KEY.jpg (or the suffix of its format) and KEY.cls."""

    def __init__(self, number: int, file: BinaryIO) -> None:
        self._number = number
        self._tar = tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115  closed by close
        self.records: list[ShardRecord] = []

    def add(self, sample: Sample) -> None:
        """Append a sample."""
        offset = self._tar.offset + tarfile.BLOCKSIZE  # after the member's header
        self._member(f"{sample.key:08d}{sample.image.suffix}", sample.image.data)
        self._member(f"{sample.key:08d}.cls", str(sample.label).encode())
        self.records.append(_record(self._number, offset, sample))

    def close(self) -> None:
        """End the archive."""
        self._tar.close()

    def _member(self, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        self._tar.addfile(member, io.BytesIO(data))


class RecordWriter:
    """TFRecords: length, its masked CRC-32C, a tf.train.Example, its masked CRC-32C."""

    def __init__(self, number: int, file: BinaryIO) -> None:
        self._file, self._number = file, number
        self._written = 0
        self.records: list[ShardRecord] = []

    def add(self, sample: Sample) -> None:
        """Append a sample."""
        data = encode_example(sample)
        head = struct.pack("<Q", len(data))
        self._file.write(b"".join((head, struct.pack("<I", masked(head)), data, struct.pack("<I", masked(data)))))
        end = self._written + HEAD + len(data)
        self.records.append(_record(self._number, end - len(sample.image.data), sample))
        self._written = end + TAIL

    def close(self) -> None:
        """Nothing: a record file has no end marker."""


WRITERS: dict[str, Callable[[int, BinaryIO], ShardWriter]] = {"tar": TarWriter, "tfrecord": RecordWriter}


def _record(shard: int, offset: int, sample: Sample) -> ShardRecord:
    image = sample.image
    return shard, len(image.data), offset, sample.label, crc32c(image.data), image.width, image.height


def encode_example(sample: Sample) -> bytes:
    """The tf.train.Example of an image, whose bytes are the Example's last.

    Keys, and labels from 1, are those of TensorFlow's ImageNet scripts (tpu/tools/datasets/imagenet_to_gcs.py), with
    image/class/text for classes that are not synsets (inception/data/build_image_data.py).
    """
    image, name = sample.image, sample.class_name
    features = {
        b"image/height": _integer(image.height),
        b"image/width": _integer(image.width),
        # As the scripts have it for every image: readers that request three channels get them, of gray ones too.
        b"image/colorspace": _text(b"RGB"),
        b"image/channels": _integer(3),
        LABEL: _integer(sample.label + FIRST_LABEL),
        SYNSET_NAME if SYNSET.fullmatch(name) else TEXT: _text(name.encode(errors="surrogateescape")),
        b"image/format": _text(b"JPEG"),
        b"image/filename": _text(sample.file_name.encode(errors="surrogateescape")),
        IMAGE: _text(image.data),
    }
    # Example.features = 1; Features.feature = 1, a map of key = 1 and value = 2 (example.proto, feature.proto)
    entries = (_field(1, _field(1, key) + _field(2, value)) for key, value in features.items())
    return _field(1, b"".join(entries))


def _text(value: bytes) -> bytes:
    """A Feature whose bytes_list, 1, has one value."""
    return _field(1, _field(1, value))


def _integer(value: int) -> bytes:
    """A Feature whose int64_list, 3, has one value; packed, as proto3 has repeated numbers."""
    return _field(3, _field(1, _varint(value)))


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | LENGTH) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


OVERHEAD = 2048  # bytes of a sample in a tar beside its image: two headers, padding, the label; fewer in a TFRecord
SAMPLED = 64  # images that are re-encoded to estimate the size of the shards
OPTIONS = "options.json"
AHEAD = 256  # images that threads encode in advance


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A split to pack."""

    name: str
    images: Images
    labels: Indices
    classes: tuple[str, ...]
    options: Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An image for a shard; `encoded` is None where it cannot be read, for the reason `error`."""

    name: str
    label: int
    class_name: str
    encoded: Encoded | None
    error: str = ""


def prepare(
    dataset: Dataset,
    out: Path,
    options: Options,
    *,
    threads: int | None = None,
    on_image: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Pack all splits into shards, each in one random permutation; images that cannot be read are skipped and named.

    `out` is complete or absent. Unfinished work is kept beside it, in .OUT.partial, and continued when prepare is
    called again with the same options; a complete `out` with the same options is left as it is. `on_image` is called
    after each image. Returns the manifest's splits. Raises InputError where `out` is anything else, or the disk is too
    small.
    """
    requested = asdict(options)
    if out.exists():
        manifest = read_manifest(out) if (out / MANIFEST).is_file() else None
        if manifest is None or {**asdict(Options(kind="", source="")), **manifest["options"]} != requested:
            raise InputError(
                f"{out} already exists, and was not made with this source and these options: remove it, or prepare "
                "into another folder"
            )
        complete: dict[str, dict[str, Any]] = manifest["splits"]
        return complete
    splits = [
        Split(name=name, images=images, labels=images.labels, classes=dataset.classes, options=options)
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


def _unfinished(out: Path, requested: dict[str, Any]) -> Path:
    """The folder .OUT.partial, emptied where it was begun with other options."""
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
    """Raise InputError where the disk has no room for `needed` bytes, including those already written."""
    written = sum(path.stat().st_size for path in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if needed - written > free:
        raise InputError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, the shards need about {needed / 1e9:.1f}: free some space, "
            "or prepare elsewhere"
        )


def _bytes(images: Images) -> int:
    return sum(images.size(i) + OVERHEAD for i in range(len(images)))


def _size_factor(split: Split) -> float:
    """Bytes of a shard per byte of the source, estimated from a sample."""
    images, options = split.images, split.options
    if options.quality is None:
        return 1.0
    before = after = 0
    for i in epoch_order(len(images), options.seed, 0)[:SAMPLED].tolist():
        prepared = _prepare_image(split, i)
        if prepared.encoded:
            before += images.size(i) + OVERHEAD
            after += len(prepared.encoded.data) + OVERHEAD
    return after / before if before else 1.0


def _prepare_image(split: Split, i: int) -> Prepared:
    options, label, encoded, problem = split.options, int(split.labels[i]), None, ""
    try:
        encoded = encode(
            split.images.read(i),
            short_side=options.short_side,
            quality=options.quality,
            jpeg_only=options.format == "tfrecord",  # its readers call decode_jpeg
        )
    except (ImageError, OSError) as error:
        encoded, problem = None, str(error)
    name, class_name = split.images.name(i), split.classes[label]
    return Prepared(name=name, label=label, class_name=class_name, encoded=encoded, error=problem)


def _write_split(
    pool: ThreadPoolExecutor, folder: Path, split: Split, factor: float, on_image: Callable[[], object]
) -> dict[str, Any]:
    """Write a split's index and those shards that do not exist yet; returns the manifest's entry."""
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
            writer = partial(WRITERS[options.format], number)
            _write_shard(path, receipt, writer, _prepared_images(pool, split, part, on_image), written)
        shards.append(json.loads(receipt.read_text(encoding="utf-8")))
        written += len(shards[-1]["records"])
    records = [tuple(record) for shard in shards for record in shard["records"]]
    if not records:
        raise InputError(f"{split.name}: not one image can be read: {shards[0]['damaged'][0]}")
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
    path: Path,
    receipt: Path,
    writer: Callable[[BinaryIO], ShardWriter],
    images: Iterator[Prepared],
    first_key: int,
) -> None:
    """Write a shard, then its receipt: a file that exists only beside a complete shard, with the shard's records."""
    unusual: Counter[str] = Counter()
    damaged: list[str] = []
    records: list[ShardRecord] = []

    def write(file: BinaryIO) -> None:
        shard = writer(file)
        for image in images:
            if image.encoded is None:
                damaged.append(f"{image.name}: {image.error}")
                continue
            unusual.update(image.encoded.unusual)
            shard.add(
                Sample(
                    key=first_key + len(shard.records),
                    image=image.encoded,
                    label=image.label,
                    class_name=image.class_name,
                    file_name=image.name.rpartition("/")[2],
                )
            )
        shard.close()
        records.extend(shard.records)

    write_with(path, write)
    write_text(receipt, json.dumps({"records": records, "unusual": unusual, "damaged": damaged}))


def _prepared_images(
    pool: ThreadPoolExecutor, split: Split, part: Indices, on_image: Callable[[], object]
) -> Iterator[Prepared]:
    """The images of a shard in order, prepared by all threads up to AHEAD images in advance."""
    waiting: deque[Future[Prepared]] = deque()
    for i in part.tolist():
        waiting.append(pool.submit(_prepare_image, split, i))
        if len(waiting) > AHEAD:
            yield waiting.popleft().result()
            on_image()
    while waiting:
        yield waiting.popleft().result()
        on_image()


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
