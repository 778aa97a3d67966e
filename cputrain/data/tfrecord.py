"""ImageNet as TFRecords (train-00000-of-01024, validation-...), read without TensorFlow.

A record: length (8 bytes, little endian), its masked CRC-32C, a tf.train.Example, its masked CRC-32C
(tensorflow/core/lib/io/record_writer.h). The Example's features (example.proto, feature.proto): image/encoded,
image/class/label, and image/class/synset or image/class/text for the class's name.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from affinity.errors import InputError
from cputrain.data.images import Dataset
from cputrain.data.shards import crc32c

SPLITS = {"train": "train-*-of-*", "val": "validation-*-of-*", "test": "test-*-of-*"}
HEAD, TAIL = 12, 4
MASK = 0xA282EAD8
IMAGE, LABEL = b"image/encoded", b"image/class/label"
SYNSET_NAME, TEXT = b"image/class/synset", b"image/class/text"
FIRST_LABEL = 1  # of TensorFlow's scripts, which keep 0 for a class of the background
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # protobuf's wire types

Span = tuple[int, int]


class Records:
    """Images inside records, found by one pass over the records' small fields."""

    def __init__(self, paths: list[Path]) -> None:
        """Raises InputError where a file is no TFRecord file of images, or ends early."""
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
        """Label of each image, shape (n,)."""
        return self._labels

    def number_classes(self, numbers: dict[int, int]) -> None:
        """Replace the records' own labels."""
        self._labels = np.array([numbers[label] for label in self._rows[:, 5].tolist()], dtype=np.int64)

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
        """Bytes of image i."""
        return int(self._rows[i, 4])

    def name(self, i: int) -> str:
        """File and byte of the record."""
        return f"{self.paths[int(self._rows[i, 0])]}:{int(self._rows[i, 1]) - HEAD}"


def open_tfrecords(source: Path) -> Dataset:
    """The splits of a folder, test-* where there are such files. Raises InputError that names what is missing or
    wrong."""
    found = {split: sorted(source.glob(pattern)) for split, pattern in SPLITS.items()}
    for split in ("train", "val"):
        if not found[split]:
            raise InputError(f"{source} has no {SPLITS[split]}: name the folder that holds ImageNet's TFRecords")
    splits = {split: Records(paths) for split, paths in found.items() if paths}
    names = splits["train"].names
    numbers = {label: number for number, label in enumerate(sorted(names))}
    for split, records in splits.items():
        if extra := sorted(set(records.names) - set(names)):
            raise InputError(f"{source}: label {extra[0]} is in {SPLITS[split]}, and not in training files")
        records.number_classes(numbers)
    return Dataset(classes=tuple(names[label] for label in sorted(names)), **splits)


def masked(data: bytes) -> int:
    """CRC-32C as record files have it: rotated and shifted, so that checksums of checksums differ."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF


def examples(path: Path) -> Iterator[tuple[Span, Span, int, str]]:
    """Of each record: its offset and length, where its image begins and ends, label, class's name ("" for none).

    Images themselves are not read. Raises InputError.
    """
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty: is its download whole?")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0
        while at < len(data):
            head = data[at : at + HEAD]
            length = int.from_bytes(head[:8], "little")
            if len(head) < HEAD or masked(head[:8]) != int.from_bytes(head[8:], "little"):
                raise InputError(f"{path} is no TFRecord file, or damaged at byte {at:,}")
            start = at + HEAD
            at = start + length + TAIL
            if at > len(data):
                raise InputError(f"{path} ends within a record: is its download whole?")
            try:
                image, label, name = _example(data, start, start + length)
            except (IndexError, struct.error, KeyError) as error:
                raise InputError(
                    f"{path}: the record at byte {start - HEAD:,} is no image's Example: {error}"
                ) from None
            yield (start, length), image, label, name


def _example(data: mmap.mmap, start: int, end: int) -> tuple[Span, int, str]:
    features: dict[bytes, Span] = {}
    for _, (begin, stop) in _parts(data, start, end, 1):
        for _, entry in _parts(data, begin, stop, 1):
            fields = dict(_parts(data, *entry))
            features[data[slice(*fields[1])]] = fields[2]
    image = dict(_parts(data, *dict(_parts(data, *features[IMAGE]))[1]))[1]
    values = dict(_parts(data, *features[LABEL]))[3]
    packed = dict(_parts(data, *values))[1]
    label, _ = _varint(data, packed[0])
    for key in (SYNSET_NAME, TEXT):
        if key in features:
            return image, label, data[slice(*dict(_parts(data, *dict(_parts(data, *features[key]))[1]))[1])].decode()
    return image, label, ""


def _parts(data: mmap.mmap, start: int, end: int, wanted: int | None = None) -> Iterator[tuple[int, Span]]:
    """The fields of a protobuf message and where their values lie, for those with a length; numbers lie as they are."""
    at = start
    while at < end:
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == LENGTH:
            length, at = _varint(data, at)
            span = (at, at + length)
        elif kind == VARINT:
            span = (at, _varint(data, at)[1])
        elif kind in (FIXED32, FIXED64):
            span = (at, at + (4 if kind == FIXED32 else 8))
        else:
            raise IndexError(f"wire type {kind} at byte {at:,}")
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
            raise IndexError(f"no number at byte {at:,}")
