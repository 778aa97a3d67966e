"""Writing shards: tar archives for webdataset readers, or TFRecords for TensorFlow's."""

import io
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from cputrain.data.formats.imagenet import SYNSET
from cputrain.data.formats.shards import crc32c
from cputrain.data.formats.tfrecord import FIRST_LABEL, HEAD, IMAGE, LABEL, LENGTH, SYNSET_NAME, TAIL, TEXT, masked
from cputrain.data.prepare.encode import Encoded

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
