"""TFRecords of images (train-00000-of-01024, imagenet2012-train.tfrecord-...), read without TensorFlow.

A record consists of its length (8 bytes, little endian), the length's masked CRC-32C, a tf.train.Example and the
Example's masked CRC-32C (tensorflow/core/lib/io/record_writer.h). The features that are read (example.proto,
feature.proto) are those of TensorFlow's ImageNet scripts, image/encoded, image/class/label, and image/class/synset or
image/class/text for the class's name; or those of tensorflow_datasets, image and label, with the names of the classes
in label.labels.txt.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import counted
from cputrain.data.formats.dataset import Images, OwnSplits
from cputrain.data.formats.places import record_files
from cputrain.data.formats.shards import crc32c
from cputrain.data.formats.subset import subset_of

HEAD, TAIL = 12, 4
MASK = 0xA282EAD8
IMAGE, LABEL = b"image/encoded", b"image/class/label"
SYNSET_NAME, TEXT = b"image/class/synset", b"image/class/text"
IMAGES, LABELS = (IMAGE, b"image"), (LABEL, b"label", b"class")  # the last one of TFRecords on Kaggle
CLASS_NAMES = "label.labels.txt"  # of tensorflow_datasets: a line for each label from 0
UNLABELED = -1  # as in tensorflow_datasets' test splits
COMPRESSED = {b"\x1f\x8b": "gzip -dc", b"\x78\x01": "pigz -dc", b"\x78\x9c": "pigz -dc"}  # gzip, zlib
FIRST_LABEL = 1  # of TensorFlow's ImageNet scripts, which reserve 0 for the background
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # protobuf's wire types

Span = tuple[int, int]


class RecordImages:
    """The images of one split's TFRecord files."""

    def __init__(self, paths: list[Path]) -> None:
        """Find the images in one pass over all records. Raises InputError where a file is damaged or not of images."""
        self.paths = paths
        self._files = [path.open("rb") for path in paths]
        rows: list[tuple[int, int, int, int, int, int]] = []
        self.names: dict[int, str] = {}
        for number, path in enumerate(paths):
            for record, (begin, end), label, name in examples(path):
                rows.append((number, *record, begin - record[0], end - begin, label))
                self.names.setdefault(label, name or str(label))
        self._rows = np.array(rows, dtype=np.int64).reshape(len(rows), 6)
        self._labels = self._rows[:, 5].copy()

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image, shape (n,)."""
        return self._labels

    def relabel(self, labels: dict[int, int]) -> None:
        """Replace the labels of the records; `labels` maps each to a class number from 0."""
        self._labels = np.array([labels[label] for label in self._rows[:, 5].tolist()], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, i: int) -> bytes:
        """The image's bytes. Raises OSError where the record's checksum is wrong."""
        file, start, length, begin, size, _ = self._rows[i].tolist()
        record = os.pread(self._files[file].fileno(), length + TAIL, start)
        if len(record) < length + TAIL or masked(record[:-TAIL]) != int.from_bytes(record[-TAIL:], "little"):
            raise OSError(f"checksum differs: the record at byte {start - HEAD:,} is damaged")
        return record[begin : begin + size]

    def size(self, i: int) -> int:
        """The bytes of image i."""
        return int(self._rows[i, 4])

    def name(self, i: int) -> str:
        """The record's file and offset."""
        return f"{self.paths[int(self._rows[i, 0])]}:{int(self._rows[i, 1]) - HEAD}"


def open_tfrecords(source: Path) -> OwnSplits:
    """Open the TFRecord files of a folder, splits by the files' names; records without a label are left out.

    Raises InputError that names what is missing or wrong.
    """
    found = record_files(source)
    if "train" not in found:
        raise InputError(
            f"{source} has no TFRecords of the training split (train-*-of-*, *-train.tfrecord-*): name the folder that "
            "contains them"
        )
    names, notes = _class_names(source), []
    records: dict[str, RecordImages] = {}
    for split, paths in found.items():
        filled = [path for path in paths if path.stat().st_size]
        if not filled:
            raise InputError(f"{paths[0]} is empty, as are all files of its split: is the download complete?")
        if len(filled) < len(paths):
            notes.append(f"{source}: {counted(len(paths) - len(filled), 'empty file')} of the split {split}")
        records[split] = RecordImages(filled)
    names = names or {label: name for label, name in records["train"].names.items() if label != UNLABELED}
    numbers = {label: number for number, label in enumerate(sorted(names))}
    splits: dict[str, Images] = {}
    for split, images in records.items():
        if extra := sorted(set(images.names) - set(names) - {UNLABELED}):
            raise InputError(f"{found[split][0]}: label {extra[0]} is not a class of the training files")
        images.relabel({**numbers, UNLABELED: UNLABELED})
        labeled = np.flatnonzero(images.labels != UNLABELED)
        if len(labeled) == len(images):
            splits[split] = images
            continue
        notes.append(f"{source}: {counted(len(images) - len(labeled), 'image')} of the split {split} without a label")
        if len(labeled):
            splits[split] = subset_of(images, labeled)
    if "train" not in splits:
        keys = b" or ".join(LABELS).decode()
        raise InputError(f"{found['train'][0]}: not one record has a label, {keys}")
    if "val" not in splits and "test" in splits:
        splits["val"] = splits.pop("test")
    classes = tuple(names[label] for label in sorted(names))
    return OwnSplits(classes=classes, notes=tuple(notes), **splits)


def _class_names(source: Path) -> dict[int, str]:
    """The names of the classes by label, where tensorflow_datasets has written them."""
    path = source / CLASS_NAMES
    return dict(enumerate(path.read_text(encoding="utf-8").splitlines())) if path.is_file() else {}


def masked(data: bytes) -> int:
    """The masked CRC-32C of record files: rotated, plus a constant, so that data may contain checksums itself."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF


def examples(path: Path) -> Iterator[tuple[Span, Span, int, str]]:
    """For each record: its (offset, length), its image's (begin, end), label, and class name or "".

    The images themselves are not read. Raises InputError.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0
        while at < len(data):
            head = data[at : at + HEAD]
            length = int.from_bytes(head[:8], "little")
            if len(head) < HEAD or masked(head[:8]) != int.from_bytes(head[8:], "little"):
                if tool := COMPRESSED.get(head[:2]) if at == 0 else None:
                    raise InputError(
                        f"{path} is compressed, where no image can be read by itself: unpack each file with "
                        f"{tool} <{path.name} >OUT/{path.name}"
                    )
                raise InputError(f"{path} is not a TFRecord file, or it is damaged at byte {at:,}")
            start = at + HEAD
            at = start + length + TAIL
            if at > len(data):
                raise InputError(f"{path} ends within a record: is the download complete?")
            try:
                image, label, name = _example(data, start, start + length)
            except (IndexError, struct.error, KeyError, ValueError) as error:
                raise InputError(
                    f"{path}: the record at byte {start - HEAD:,} is not the Example of an image: {error}"
                ) from None
            yield (start, length), image, label, name


def _example(data: mmap.mmap, start: int, end: int) -> tuple[Span, int, str]:
    """Where the image lies, the label and the class name of the Example in [start, end)."""
    features: dict[bytes, Span] = {}
    for _, (begin, stop) in _fields(data, start, end, 1):
        for _, entry in _fields(data, begin, stop, 1):
            fields = dict(_fields(data, *entry))
            features[data[slice(*fields[1])]] = fields[2]
    encoded = next((features[key] for key in IMAGES if key in features), None)
    if encoded is None:
        has = b", ".join(sorted(features)).decode(errors="replace")
        raise ValueError(f"it has no {b' or '.join(IMAGES).decode()}, but {has or 'nothing'}")
    image = dict(_fields(data, *dict(_fields(data, *encoded))[1]))[1]
    label = UNLABELED
    if label_key := next((key for key in LABELS if key in features), None):
        values = dict(_fields(data, *features[label_key]))
        if 3 not in values:
            raise ValueError(f"its {label_key.decode()} is no integer")
        label, _ = _varint(data, dict(_fields(data, *values[3]))[1][0])
        label -= (label >> 63) << 64  # an int64: -1 has ten bytes
    for key in (SYNSET_NAME, TEXT):
        if key in features:
            return (
                image,
                label,
                data[slice(*dict(_fields(data, *dict(_fields(data, *features[key]))[1]))[1])].decode(
                    errors="surrogateescape"
                ),
            )
    return image, label, ""


def _fields(data: mmap.mmap, start: int, end: int, wanted: int | None = None) -> Iterator[tuple[int, Span]]:
    """The numbers of a protobuf message's fields (or of those `wanted`), and where their values begin and end."""
    at = start
    while at < end:
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == LENGTH:
            length, at = _varint(data, at)
            span = (at, at + length)
        elif wire_type == VARINT:
            span = (at, _varint(data, at)[1])
        elif wire_type in (FIXED32, FIXED64):
            span = (at, at + (4 if wire_type == FIXED32 else 8))
        else:
            raise IndexError(f"unknown wire type {wire_type} at byte {at:,}")
        at = span[1]
        if at > end:
            raise IndexError(f"a field ends outside its message at byte {at:,}")
        if wanted is None or number == wanted:
            yield number, span


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError(f"a number without end at byte {at:,}")
