"""Files of many images, read in place and written without TensorFlow: TFRecords (train-00000-of-01024,
imagenet2012-train.tfrecord-...) and tar files, including webdataset's.

A record consists of its length (8 bytes, little endian), the length's masked CRC-32C, a tf.train.Example and the
Example's masked CRC-32C (tensorflow/core/lib/io/record_writer.h). The features (example.proto, feature.proto) follow
TensorFlow's ImageNet scripts, with image/encoded, image/class/label, and image/class/synset or image/class/text for the
class's name; or tensorflow_datasets, with image and label, and the names of the classes in label.labels.txt.

The files of a sample in a tar share a key: the path up to the first dot of the file name. The label is the decimal
number or the text in KEY.cls, or else "label" in KEY.json.
"""

import json
import mmap
import os
import re
import struct
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import first_named, plural
from cputrain.data.formats.dataset import FileParts
from cputrain.data.formats.shards import crc32c
from cputrain.data.formats.source import (
    SYNSET,
    TRAIN,
    UNLABELED,
    Source,
    SplitRows,
    is_hidden,
    is_image,
    labeled_source,
    read_lines,
)
from cputrain.files import check_downloaded

HEAD, TAIL = 12, 4
MASK = 0xA282EAD8
IMAGE, LABEL = b"image/encoded", b"image/class/label"
SYNSET_NAME, TEXT = b"image/class/synset", b"image/class/text"
IMAGES, LABELS = (IMAGE, b"image"), (LABEL, b"label", b"class")  # class: in TFRecords on Kaggle
CLASS_NAMES = "label.labels.txt"  # in tensorflow_datasets: a line for each label from 0
GZIP = b"\x1f\x8b"
COMPRESSED = {GZIP: "gzip -dc", b"\x78\x01": "pigz -dc", b"\x78\x9c": "pigz -dc"}  # gzip, zlib
FIRST_LABEL = 1  # in TensorFlow's ImageNet scripts, which reserve 0 for the background
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # protobuf's wire types

Span = tuple[int, int]

Member = tuple[str, int, int]
"""Name, offset and length of a file in a tar."""

JSON_LABEL = "label"  # in KEY.json
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # as in a binary number written by numpy
MAX_LABEL_BYTES = 1 << 20


class RecordImages(FileParts):
    """Images in the TFRecord files of one split.

    `positions`, shape (n, 5), has each image's file, offset and length, and its record's offset and length.
    """

    def __init__(self, paths: Sequence[Path], positions: NDArray[np.int64], labels: Sequence[int]) -> None:
        super().__init__(paths, positions[:, :3], labels, ())
        self._records = positions[:, 3:]

    def read(self, i: int) -> bytes:
        """Return the image's bytes. Raises OSError if the record's checksum is wrong."""
        (file, offset, size), (start, length) = self._places[i].tolist(), self._records[i].tolist()
        record = os.pread(self._files[file].fileno(), length + TAIL, start)
        if len(record) < length + TAIL or masked(record[:-TAIL]) != int.from_bytes(record[-TAIL:], "little"):
            raise OSError(f"checksum differs, the record at byte {start - HEAD:,} is damaged")
        return record[offset - start : offset - start + size]

    def name(self, i: int) -> str:
        """Return the record's file and offset."""
        return f"{self.paths[int(self._places[i, 0])]}:{int(self._records[i, 0]) - HEAD}"


def read_tfrecords(root: Path, files: Mapping[str, Sequence[Path]]) -> Source:
    """Find the images in a folder's TFRecord files in one pass over all records; images without a label are left out.

    Raises InputError if data is missing, invalid or damaged.
    """
    notes = []
    list_of_tfds = root / CLASS_NAMES
    names = dict(enumerate(read_lines(list_of_tfds))) if list_of_tfds.is_file() else {}
    records = {}
    for split, paths in files.items():
        filled = [path for path in paths if path.stat().st_size]
        if empty := len(paths) - len(filled):
            notes.append(f"{root}: ignored {plural(empty, 'empty file')} of the {split} split")
        records[split], own_names = _record_rows(paths[0], filled)
        if split == "train":
            names = names or own_names
    classes = {label: names[label] for label in sorted(names)}
    keys = f"{b' or '.join(LABELS).decode()}, the first record has {_keys_of(files['train'])}"
    labels_are_in = f"{keys}: write the number of its class under one of these keys"
    return labeled_source(root, records, classes, labels_are_in=labels_are_in, notes=notes)


def examine_tfrecords(root: Path, files: Mapping[str, Sequence[Path]]) -> str:
    """Name the first training file. Raises InputError if its first record is not an image with a label."""
    path = next((path for path in files[TRAIN] if path.stat().st_size), files[TRAIN][0])
    first = next(examples(path), None) if path.stat().st_size else None
    if first is None or first[2] is None:
        raise InputError(f"{path} has no image with a label")
    return str(path.relative_to(root))


def _record_rows(first: Path, paths: Sequence[Path]) -> tuple[SplitRows, dict[int, str]]:
    """Return the rows of these files, and the name of each label; messages name the file `first`."""
    positions: list[tuple[int, ...]] = []
    labels: list[int | None] = []
    names: dict[int, str] = {}
    for number, path in enumerate(paths):
        for record, (begin, end), label, name in examples(path):
            positions.append((number, begin, end - begin, *record))
            labels.append(label)
            if label is not None:
                names.setdefault(label, name or str(label))
    table = np.array(positions, dtype=np.int64).reshape(-1, 5)
    rows = SplitRows(labels=labels, file=first, images=lambda rows, numbers: RecordImages(paths, table[rows], numbers))
    return rows, names


def record_of(example: bytes) -> bytes:
    """Encode a record: length, its masked CRC-32C, the Example, its masked CRC-32C."""
    head = struct.pack("<Q", len(example))
    return b"".join((head, struct.pack("<I", masked(head)), example, struct.pack("<I", masked(example))))


def record_problem(file: BinaryIO, _key: int, offset: int, length: int, end: int) -> str | None:
    """Return what is wrong with the record around an image, its last field; the previous image ends at byte `end`."""
    start = end + TAIL if end else 0
    file.seek(start)
    head = file.read(HEAD)
    length = offset + length - start - HEAD
    example, tail = file.read(length), file.read(TAIL)
    if int.from_bytes(head[:8], "little") != length or masked(head[:8]) != int.from_bytes(head[8:], "little"):
        return f"the record's length at byte {start:,} is damaged"
    if masked(example) != int.from_bytes(tail, "little"):
        return f"the record at byte {start:,} is damaged outside the image"
    return None


def encode_example(data: bytes, width: int, height: int, label: int, *, class_name: str, file_name: str) -> bytes:
    """Encode an image as a tf.train.Example, which ends with the image's bytes; `label` counts from 0.

    The keys, and the stored labels from 1, follow TensorFlow's ImageNet scripts
    (tpu/tools/datasets/imagenet_to_gcs.py), with image/class/text for classes that are not synsets
    (inception/data/build_image_data.py).
    """
    features = {
        b"image/height": _integer(height),
        b"image/width": _integer(width),
        # As in the scripts, for gray images too: readers that request three channels get three.
        b"image/colorspace": _text(b"RGB"),
        b"image/channels": _integer(3),
        LABEL: _integer(label + FIRST_LABEL),
        SYNSET_NAME if SYNSET.fullmatch(class_name) else TEXT: _text(class_name.encode(errors="surrogateescape")),
        b"image/format": _text(b"JPEG"),
        b"image/filename": _text(file_name.encode(errors="surrogateescape")),
        IMAGE: _text(data),
    }
    # Example.features = 1; Features.feature = 1, a map of key = 1 and value = 2 (example.proto, feature.proto)
    entries = (_field(1, _field(1, key) + _field(2, value)) for key, value in features.items())
    return _field(1, b"".join(entries))


def _text(value: bytes) -> bytes:
    """Encode a Feature whose bytes_list (field 1) has one value."""
    return _field(1, _field(1, value))


def _integer(value: int) -> bytes:
    """Encode a Feature whose int64_list (field 3) has one value, packed like repeated numbers in proto3."""
    return _field(3, _field(1, _encode_varint(value)))


def _field(number: int, data: bytes) -> bytes:
    return _encode_varint(number << 3 | LENGTH) + _encode_varint(len(data)) + data


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def masked(data: bytes) -> int:
    """Return the masked CRC-32C of record files: rotated, plus a constant, as the data may itself contain checksums."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF


def examples(path: Path) -> Iterator[tuple[Span, Span, int | None, str]]:
    """Yield each record's (offset, length), its image's (begin, end), its label or None, and its class name or "".

    The images themselves are not read. Raises InputError if a record is invalid.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0
        while at < len(data):
            head = data[at : at + HEAD]
            length = int.from_bytes(head[:8], "little")
            if len(head) < HEAD or masked(head[:8]) != int.from_bytes(head[8:], "little"):
                if tool := COMPRESSED.get(head[:2]) if at == 0 else None:
                    raise InputError(
                        f"{path} is compressed, which does not allow random access: unpack each file with "
                        f"{tool} <{path.name} >OUT/{path.name}"
                    )
                check_downloaded(path)
                raise InputError(f"{path} is not a TFRecord file, or it is damaged at byte {at:,}")
            start = at + HEAD
            at = start + length + TAIL
            if at > len(data):
                raise InputError(f"{path} ends within a record: is the download complete?")
            try:
                image, label, name = _example(data, start, start + length)
            except (IndexError, struct.error, KeyError, ValueError) as error:
                raise InputError(
                    f"the record at byte {start - HEAD:,} of {path} is not the Example of an image: {error}"
                ) from None
            yield (start, length), image, label, name


def _keys_of(paths: Sequence[Path]) -> str:
    """Return the keys of the first record in these files, sorted, for messages."""
    path = next((path for path in paths if path.stat().st_size), None)
    if path is None:
        return "nothing"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _named(_features(data, HEAD, HEAD + int.from_bytes(data[:8], "little")))


def _named(keys: Iterable[bytes]) -> str:
    return b", ".join(sorted(keys)).decode(errors="replace") or "nothing"


def _features(data: mmap.mmap, start: int, end: int) -> dict[bytes, Span]:
    """Return the span of each key's Feature in the Example in [start, end)."""
    features: dict[bytes, Span] = {}
    for _, (begin, stop) in _fields(data, start, end, 1):
        for _, entry in _fields(data, begin, stop, 1):
            fields = dict(_fields(data, *entry))
            features[data[slice(*fields[1])]] = fields[2]
    return features


def _example(data: mmap.mmap, start: int, end: int) -> tuple[Span, int | None, str]:
    """Return the image's span, the label and the class name of the Example in [start, end)."""
    features = _features(data, start, end)
    encoded = next((features[key] for key in IMAGES if key in features), None)
    if encoded is None:
        raise ValueError(f"it has no {b' or '.join(IMAGES).decode()}, but {_named(features)}")
    images = [image for _, span in _fields(data, *encoded, 1) for _, image in _fields(data, *span)]
    if len(images) != 1:
        raise ValueError(f"it has {len(images)} images as bytes")
    image = images[0]
    label = None
    if label_key := next((key for key in LABELS if key in features), None):
        values = dict(_fields(data, *features[label_key]))
        if 3 not in values:
            raise ValueError(f"its {label_key.decode()} is not an integer")
        numbers = _integers(data, *values[3])
        if len(numbers) > 1:
            raise ValueError(f"its {label_key.decode()} has {len(numbers)} values, but an image has one class")
        label = None if numbers in ([], [UNLABELED]) else numbers[0]
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


def _integers(data: mmap.mmap, start: int, end: int) -> list[int]:
    """Return the values of an Int64List: packed, or one field each as in proto2."""
    rows = []
    for _, (begin, stop) in _fields(data, start, end, 1):
        at = begin
        while at < stop:
            number, at = _varint(data, at)
            rows.append(number - ((number >> 63) << 64))  # two's complement of 64 bits
    return rows


def _fields(data: mmap.mmap, start: int, end: int, only: int | None = None) -> Iterator[tuple[int, Span]]:
    """Yield the number and the value's span of each field of a protobuf message, or of the fields numbered `only`."""
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
        if only is None or number == only:
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
            raise IndexError(f"an unterminated varint at byte {at:,}")


def tar_members(archive: Path, start: int) -> Iterator[Member]:
    """Yield name, offset and length of the regular files in a tar that begins at byte `start` of a file.

    Nothing is unpacked, so any names are safe; links and hidden files are skipped. Raises InputError if the archive is
    compressed, truncated, damaged or has a name twice.
    """
    names: set[str] = set()
    try:
        with archive.open("rb") as file:
            if not start and file.read(2) == GZIP:
                raise InputError(
                    f"{archive} is gzipped, which does not allow random access: unpack it with gunzip, or with "
                    "tar -xzf if it has class folders"
                )
            if not start:
                check_downloaded(archive)
            file.seek(start)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in tar:
                    if member.isfile() and not any(is_hidden(part) for part in Path(member.name).parts if part != ".."):
                        if member.name in names:
                            raise InputError(f"{archive} contains {member.name} twice: was something appended to it?")
                        names.add(member.name)
                        yield member.name, member.offset_data, member.size
                    tar.members.clear()  # type: ignore[attr-defined]  # else it keeps all 1.3 million in memory
                file.seek(tar.offset)  # tarfile ends in silence at a damaged header
                if names and any(file.read(tarfile.BLOCKSIZE)):
                    raise tarfile.ReadError(f"no header at byte {tar.offset:,}")
    except (OSError, tarfile.TarError) as error:
        raise InputError(f"cannot read {archive}: {error}; is the download complete?") from None


def tar_member(name: str, data: bytes) -> bytes:
    """Encode a member of a tar: a header, the data, and zeros up to a whole block."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    return member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def tar_end(size: int) -> bytes:
    """Return the end of a tar after members of `size` bytes: two blocks of zeros, padded to a whole record."""
    end = 2 * tarfile.BLOCKSIZE
    return bytes(end + -(size + end) % tarfile.RECORDSIZE)


def member_problem(file: BinaryIO, key: int, offset: int, length: int, _end: int) -> str | None:
    """Return what is wrong with the header before the image KEY.* at `offset`, or None."""
    file.seek(offset - tarfile.BLOCKSIZE)
    try:
        member = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), tarfile.ENCODING, "surrogateescape")
    except tarfile.HeaderError as error:
        return f"the archive is damaged before the image ({error})"
    if member.size != length or not member.name.startswith(f"{key:08d}."):
        return f"the archive has {member.name}, {member.size:,} bytes, in its place"
    return None


def read_tars(root: Path, files: Mapping[str, Sequence[Path]]) -> Source:
    """Find the images and labels in the tar files of a folder in one pass over all headers.

    Raises InputError if something is missing or invalid.
    """
    rows_and_notes = {split: _tar_rows(paths) for split, paths in files.items()}
    notes = [
        f"{root}: no image in {first_named(empty)} of the {split} split"
        for split, (rows, empty) in rows_and_notes.items()
        if empty and rows.labels
    ]
    labels = {label for label in rows_and_notes["train"][0].labels if label is not None}
    if negative := [label for label in labels if isinstance(label, int) and label < 0]:
        raise InputError(
            f"{files['train'][0]} has samples with label {min(negative)}, but a label must be 0 or higher, "
            "or a string: remove samples without a label"
        )
    classes = {label: str(label) for label in sorted(labels, key=lambda label: (isinstance(label, str), label))}
    rows_by_split = {split: rows for split, (rows, _) in rows_and_notes.items()}
    return labeled_source(root, rows_by_split, classes, labels_are_in="KEY.cls or KEY.json", notes=notes)


def examine_tars(root: Path, files: Mapping[str, Sequence[Path]]) -> str:
    """Name the first training file with a sample. Raises InputError if that is not an image with a label."""
    for path in files[TRAIN]:
        if next(_samples(path), None) is not None:
            return str(path.relative_to(root))
    raise InputError(f"{files[TRAIN][0]} has no image with a label")


def _tar_rows(paths: Sequence[Path]) -> tuple[SplitRows, list[str]]:
    """Return the samples of tar files, and the names of the files without any. Raises InputError if a sample lacks its
    image or label."""
    names: list[str] = []
    positions: list[tuple[int, int, int]] = []
    labels: list[int | str | None] = []
    empty = []
    for number, path in enumerate(paths):
        before = len(names)
        for name, offset, length, label in _samples(path):
            names.append(name)
            positions.append((number, offset, length))
            labels.append(None if label == UNLABELED else label)
        if len(names) == before:
            empty.append(path.name)

    def images(rows: list[int], numbers: list[int]) -> FileParts:
        return FileParts(paths, [positions[row] for row in rows], numbers, [names[row] for row in rows])

    return SplitRows(labels=labels, file=paths[0], images=images), empty


def _samples(path: Path) -> Iterator[tuple[str, int, int, int | str]]:
    """Yield the image's name, offset and length, and the label, of each sample, whose members are consecutive."""
    if not path.stat().st_size:  # from a writer without samples; tarfile would raise an error
        return
    with path.open("rb") as file:
        for _, sample in groupby(tar_members(path, 0), key=lambda member: _key_and_suffix(member[0])[0]):
            yield _sample(path, file.fileno(), {_key_and_suffix(member[0])[1].lower(): member for member in sample})


def _key_and_suffix(name: str) -> tuple[str, str]:
    folder, _, last = name.rpartition("/")
    stem, _, suffix = last.partition(".")
    return f"{folder}/{stem}", suffix


def _sample(path: Path, file: int, sample: dict[str, Member]) -> tuple[str, int, int, int | str]:
    images = [entry for suffix, entry in sample.items() if "." not in suffix and is_image(f"x.{suffix}")]
    if len(images) != 1 or not {"cls", "json"} & sample.keys():
        names = [name for name, _, _ in sample.values()]
        in_folders = len(images) == len(sample) and "/" in names[0].removeprefix("./")
        advice = (
            "unpack the archive with tar -xf, and give the folder that has the class folders"
            if in_folders
            else "pack images in class folders with cputrain prepare imagefolder"
        )
        raise InputError(
            f"{path} has {', '.join(names)}, but a sample is one image, KEY.jpg or of another format, and its class in "
            f"KEY.cls or KEY.json: {advice}"
        )
    label_name, offset, length = sample.get("cls") or sample["json"]
    text = os.pread(file, min(length, MAX_LABEL_BYTES), offset)
    try:
        label = text.decode().strip() if "cls" in sample else _label_in(json.loads(text))
        if type(label) not in (int, str) or label == "" or CONTROL.search(str(label)):
            raise ValueError(f"{label!r} is neither a number nor a text")
    except ValueError as error:
        raise InputError(f"{label_name} in {path} has no {JSON_LABEL}: {error}") from None
    text_of_label = str(label)
    return *images[0], int(text_of_label) if text_of_label.removeprefix("-").isdecimal() else text_of_label


def _label_in(values: object) -> object:
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    if JSON_LABEL not in values:
        raise ValueError(f"it has {first_named(list(values)) or 'nothing'}")
    return values[JSON_LABEL]
