"""TFRecords of images, written here by the format's own definition."""

import struct
from pathlib import Path

import pytest

from affinity.errors import InputError
from cputrain.data.prepare import Options, prepare
from cputrain.data.shards import crc32c
from cputrain.data.source import open_dataset, open_source
from cputrain.data.survey import survey
from cputrain.data.tfrecord import masked
from tests.test_prepare import jpeg


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(image: bytes, label: int, synset: str | None, *, packed: bool = True) -> bytes:
    number = field(1, varint(label)) if packed else varint(1 << 3) + varint(label)
    features = {
        b"image/height": field(3, field(1, varint(40))),
        b"image/class/label": field(3, number),
        b"image/encoded": field(1, field(1, image)),
        b"image/object/bbox/xmin": field(2, field(1, struct.pack("<f", 0.5))),
    }
    if synset is not None:
        features[b"image/class/synset"] = field(1, field(1, synset.encode()))
    return field(1, b"".join(field(1, field(1, key) + field(2, value)) for key, value in features.items()))


def record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked(head)) + data + struct.pack("<I", masked(data))


def write(folder: Path, *, packed: bool = True, synsets: bool = True) -> None:
    folder.mkdir()
    names = ["n01440764", "n01443537", "n02086240"]
    for split, files, each in (("train", 2, 6), ("validation", 1, 3)):
        for k in range(files):
            data = b""
            for i in range(each):
                label = 1 + i % 3
                data += record(example(jpeg(100 * k + i), label, names[label - 1] if synsets else None, packed=packed))
            (folder / f"{split}-{k:05d}-of-{files:05d}").write_bytes(data)


def test_checksums_are_the_standard_s() -> None:
    """RFC 3720, B.4: the CRC-32C of 32 zero bytes, and of the numbers 0 to 31."""
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes(range(32))) == 0x46DD794E


@pytest.mark.parametrize(("packed", "synsets"), [(True, True), (False, False)])
def test_tfrecords_are_read_and_prepared(tmp_path: Path, packed: bool, synsets: bool) -> None:
    write(tmp_path / "in", packed=packed, synsets=synsets)
    dataset = open_dataset(str(tmp_path / "in"))
    assert dataset.classes == (("n01440764", "n01443537", "n02086240") if synsets else ("1", "2", "3"))
    assert dataset.train.labels.tolist() == [0, 1, 2] * 4 and dataset.val.labels.tolist() == [0, 1, 2]
    assert [dataset.train.read(i) for i in (0, 7)] == [jpeg(0), jpeg(101)]
    assert dataset.train.size(7) == len(jpeg(101))
    found = survey(str(tmp_path / "in"))
    assert (found.classes, found.train, found.val) == (dataset.classes, 12, 3)
    source = open_source("tfrecord", tmp_path / "in", val_fraction=None, seed=1)
    made = prepare(source, tmp_path / "out", Options(kind="tfrecord", source="in"))
    assert (made["train"]["images"], made["val"]["images"]) == (12, 3)


def test_damaged_records_are_named(tmp_path: Path) -> None:
    write(tmp_path / "in")
    path = tmp_path / "in/train-00001-of-00002"
    whole = path.read_bytes()
    second = len(record(example(jpeg(100), 1, "n01440764")))
    flipped = bytearray(whole)
    flipped[second + 400] ^= 1
    path.write_bytes(flipped)
    train = open_dataset(str(tmp_path / "in")).train
    assert train.read(6) == jpeg(100)
    with pytest.raises(OSError, match=f"the record at byte {second:,} is damaged"):
        train.read(7)
    for data, told in (
        (whole[:-9], "ends within a record"),
        (b"", "is empty"),
        (b"no records at all", "is no TFRecord file, or damaged at byte 0"),
        (record(b"no example"), "the record at byte 0 is no image's Example"),
        (record(field(1, b"")), "the record at byte 0 is no image's Example: b'image/encoded'"),
    ):
        path.write_bytes(data)
        with pytest.raises(InputError, match=told):
            open_dataset(str(tmp_path / "in"))
    (tmp_path / "in/validation-00000-of-00001").unlink()
    with pytest.raises(InputError, match="has no validation-"):
        open_source("tfrecord", tmp_path / "in", val_fraction=None, seed=1)
