"""TFRecords of images: those of others, made here by the format's own definition, and ours, read by protobuf."""

import io
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from PIL import Image

from cputrain.affinity.errors import InputError
from cputrain.data.formats.open import open_dataset
from cputrain.data.formats.records import masked
from cputrain.data.formats.shards import Shards, crc32c
from cputrain.data.prepare import Options, pack_dataset, sample_problems
from cputrain.data.sources import open_source
from cputrain.runs.events import read_events
from tests.cputrain.test_prepare import options
from tests.support.checkpoints import content
from tests.support.commands import here
from tests.support.forked import in_fork
from tests.support.images import jpeg, survey, write_images, write_mnist


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
    made = pack_dataset(source, tmp_path / "out", Options(kind="tfrecord", source="in"))
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
        (b"no records at all", "is not a TFRecord file, or it is damaged at byte 0"),
        (record(b"no example"), "the record at byte 0 of .* is not the Example of an image"),
        (
            record(field(1, b"")),
            "is not the Example of an image: it has no image/encoded or image, ",
        ),
    ):
        path.write_bytes(data)
        with pytest.raises(InputError, match=told):
            open_dataset(str(tmp_path / "in"))


def example_class() -> Any:
    """tf.train.Example for Google's protobuf, built from tensorflow/core/example/{example,feature}.proto."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    types = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, int, int, str], parent: Any = None) -> Any:
        made = (parent.nested_type if parent else file.message_type).add(name=name)
        for key, number, label, kind, of in fields:
            made.field.add(name=key, number=number, label=label, type=kind, **({"type_name": of} if of else {}))
        return made

    one, many = types.LABEL_OPTIONAL, types.LABEL_REPEATED
    message("BytesList", ("value", 1, many, types.TYPE_BYTES, ""))
    message("FloatList", ("value", 1, many, types.TYPE_FLOAT, ""))
    message("Int64List", ("value", 1, many, types.TYPE_INT64, ""))
    lists = [("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")]
    message("Feature", *((key, n, one, types.TYPE_MESSAGE, f".t.{of}") for n, (key, of) in enumerate(lists, 1)))
    features = message("Features", ("feature", 1, many, types.TYPE_MESSAGE, ".t.Features.FeatureEntry"))
    pair = ("key", 1, one, types.TYPE_STRING, ""), ("value", 2, one, types.TYPE_MESSAGE, ".t.Feature")
    message("FeatureEntry", *pair, parent=features).options.map_entry = True
    message("Example", ("features", 1, one, types.TYPE_MESSAGE, ".t.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


def records_of(path: Path) -> list[bytes]:
    """The data of a TFRecord file, its checksums compared, as tensorflow/core/lib/io/record_writer.h has them."""

    def check(data: bytes, stored: bytes) -> None:
        crc = google_crc32c.value(data)
        rotated = (crc >> 15) | (crc << 17) & 0xFFFFFFFF
        assert struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF) == stored

    found, data, at = [], path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        check(data[at : at + 8], data[at + 8 : at + 12])
        found.append(data[at + 12 : at + 12 + length])
        check(found[-1], data[at + 12 + length : at + 16 + length])
        at += 16 + length
    return found


def values_of(example: Any) -> dict[str, Any]:
    return {
        key: getattr(feature, feature.ListFields()[0][0].name).value[0]
        for key, feature in example.features.feature.items()
    }


def test_tfrecords_of_ours_are_what_tensorflow_s_scripts_write(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    (folder / "train/class1").rename(folder / "train/n01440764")
    (folder / "val/class1").rename(folder / "val/n01440764")
    Image.new("CMYK", (20, 30)).save(folder / "train/class2/cmyk.jpg")
    Image.new("L", (20, 30), 99).save(folder / "train/class2/gray.png")
    made = here("prepare", "imagefolder", "images", "out", "--format", "tfrecord", "--shards", "3", cwd=tmp_path)
    assert made.returncode == 0 and "labels 1 (class0) to 3 (n01440764); 0 is not used" in made.stdout, made.stderr
    out, example = tmp_path / "out", example_class()
    shards = {split: [out / f"{split}-{k:05d}-of-00003" for k in range(3)] for split in ("train", "validation")}
    assert {path.name for paths in shards.values() for path in paths} == {path.name for path in out.glob("*-of-*")}
    found = {
        split: [values_of(example.FromString(data)) for path in paths for data in records_of(path)]
        for split, paths in shards.items()
    }
    assert Counter(e["image/class/label"] for e in found["train"]) == {1: 12, 2: 14, 3: 12}
    for e in (*found["train"], *found["validation"]):
        name = e.get("image/class/synset") or e["image/class/text"]
        assert name == (b"class0", b"class2", b"n01440764")[e["image/class/label"] - 1]
        assert ("image/class/synset" in e) == (name == b"n01440764")
        with Image.open(io.BytesIO(e["image/encoded"])) as image:
            assert (image.format, image.size) == ("JPEG", (e["image/width"], e["image/height"]))
            assert image.mode == ("L" if e["image/filename"] == b"gray.png" else "RGB")
        assert (e["image/format"], e["image/colorspace"], e["image/channels"]) == (b"JPEG", b"RGB", 3)
    kept = {(e["image/class/label"], e["image/filename"]): e["image/encoded"] for e in found["train"]}
    for label, name in enumerate(("class0", "class2", "n01440764"), 1):
        path = folder / f"train/{name}/007.jpg"
        assert kept[label, b"007.jpg"] == path.read_bytes(), "JPEGs stay as they are"


def test_tfrecords_of_ours_are_shuffled_as_our_archives_are_and_opened_by_index_or_without(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    for form in ("tar", "tfrecord"):
        pack_dataset(open_dataset(str(folder)), tmp_path / form, options(folder, shards=2, seed=3, format=form))
    archives, records = (open_dataset(str(tmp_path / form)) for form in ("tar", "tfrecord"))
    assert isinstance(records.train, Shards), "with the manifest no record has to be looked for"
    (tmp_path / "tfrecord/manifest.json").unlink()
    others = open_dataset(str(tmp_path / "tfrecord"))
    assert not isinstance(others.train, Shards)
    for split in ("train", "val"):
        expected, *read = (
            [(images.splits[split].read(i), int(images.splits[split].labels[i])) for i in range(15)]
            for images in (archives, records, others)
        )
        assert read == [expected, expected]
    assert archives.classes == records.classes == others.classes


def test_every_damaged_byte_of_a_record_is_named(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    pack_dataset(open_dataset(str(folder)), tmp_path / "out", options(folder, format="tfrecord"))
    images = Shards(tmp_path / "out", "train")
    offsets = [int(offset) for offset in images.index["offset"]]
    ends = [int(row["offset"]) + int(row["length"]) + 4 for row in images.index]
    data = bytearray(images.paths[0].read_bytes())
    for at in (offsets[4] + 30, ends[8], offsets[12] - 60, ends[20] - 1):  # image, length, other field, last checksum
        data[at] ^= 4
    images.paths[0].write_bytes(data)
    found = [(i, wrong) for i, wrong in enumerate(sample_problems(tmp_path / "out", "train")) if wrong]
    assert [i for i, _ in found] == [4, 9, 12, 20]
    for (_, wrong), told in zip(
        found, ("the image's checksum differs", "length at byte", "outside the image", "outside the image"), strict=True
    ):
        assert told in wrong
    with pytest.raises(OSError, match="checksum differs"):
        images.read(4)


@pytest.mark.long
def test_a_training_on_tfrecords_looks_at_their_test_images_once_at_its_end(tmp_path: Path) -> None:
    import torch

    write_mnist(tmp_path / "mnist", train=600, val=90, zipped=False)
    prepared = ("mnist", "mnist", "data", "--val-fraction", "1/6", "--format", "tfrecord", "--shards", "2")
    assert here("prepare", *prepared, cwd=tmp_path).returncode == 0
    settings = ("data.path=data", "epochs=6", "plan.ppn=1", "plan.threads=1", "comm.backend=gloo", "output=run")
    result = in_fork("train", "mnist-adam", *settings, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "500 training, 100 validation and 90 test images" in result.stdout
    end = read_events(tmp_path / "run")[-1]
    weights = content(tmp_path / f"run/checkpoints/step-{end['steps']:07d}")["model"]
    example, paths = example_class(), sorted(tmp_path.glob("data/test-*-of-00002"))
    examples = [values_of(example.FromString(data)) for path in paths for data in records_of(path)]
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(e["image/encoded"]))).reshape(-1) for e in examples])
    # three equal channels of pixels from 0 to 1, each divided by the root of 3: see the recipe
    logits = torch.from_numpy(np.tile(pixels / 255 / 3**0.5, 3)).float() @ weights["fc.weight"].T + weights["fc.bias"]
    labels = torch.tensor([e["image/class/label"] - 1 for e in examples])
    top1 = 100 * float((logits.argmax(1) == labels).float().mean())
    top5 = 100 * float((logits.topk(5).indices == labels[:, None]).any(1).float().mean())
    assert (end["test_top1"], end["test_top5"]) == (pytest.approx(top1), pytest.approx(top5))
    assert f"test top-1           {top1:.2f} %" in result.stdout and "(90 images, each once, with the" in result.stdout
    assert f"<dt>test top-1</dt><dd>{top1:.2f} %</dd>" in (tmp_path / "run/report.html").read_text()
