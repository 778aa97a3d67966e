"""Data sets as others make them: Kaggle's ImageNet, tensorflow_datasets, webdataset, tables of polars and of paths."""

import gzip
import io
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import webdataset

from cputrain.affinity.errors import InputError
from cputrain.data.formats.open import detect_source, open_dataset
from tests.cputrain.test_image_files import counts
from tests.cputrain.test_tfrecord import field, record, varint
from tests.support.commands import here, optional
from tests.support.images import jpeg, png, survey, write_files, write_images

pyarrow = optional("pyarrow", "parquet")
parquet = optional("pyarrow.parquet", "parquet")
SYNSETS = ("n01440764", "n01443537", "n02086240")


def kaggle(top: Path) -> Path:
    """Kaggle's ImageNet as its archive unpacks: training images by synset, flat validation images, a CSV of both."""
    images = top / "ILSVRC/Data/CLS-LOC"
    for k, synset in enumerate(SYNSETS):
        (images / "train" / synset).mkdir(parents=True)
        for i in range(4):
            (images / "train" / synset / f"{synset}_{i}.JPEG").write_bytes(jpeg(10 * k + i))
    rows = ["ImageId,PredictionString"]
    for split in ("val", "test"):
        (images / split).mkdir()
        for i in range(6):
            name = f"ILSVRC2012_{split}_{i + 1:08d}"
            (images / split / f"{name}.JPEG").write_bytes(jpeg(100 + i))
            if split == "val":  # in an order of its own; several objects of an image are of one class
                rows.insert(1, f"{name},{SYNSETS[i % 3]} 85 1 499 272 " + (f"{SYNSETS[i % 3]} 1 2 3 4 " if i else ""))
    (top / "LOC_val_solution.csv").write_text("\n".join(rows) + "\n")
    (top / "LOC_synset_mapping.txt").write_text("n01440764 tench, Tinca tinca\n")
    return top


@pytest.mark.parametrize("below", ["", "ILSVRC", "ILSVRC/Data", "ILSVRC/Data/CLS-LOC"])
def test_kaggle_s_imagenet_is_read_from_any_of_its_folders(tmp_path: Path, below: str) -> None:
    folder = kaggle(tmp_path / "kaggle") / below
    assert counts(folder) == (12, 6)
    dataset = open_dataset(str(folder))
    assert dataset.classes == SYNSETS and dataset.val.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert dataset.val.read(4) == jpeg(104) and dataset.test is None
    (note,) = dataset.notes
    assert note.endswith("test, which has none of the class folders of " + str(folder.rglob("train").__next__()))
    packed = here("prepare", "imagenet", str(folder), "out", cwd=tmp_path)
    assert packed.returncode == 0, packed.stderr
    assert open_dataset(str(tmp_path / "out")).classes == SYNSETS


def test_flat_validation_images_need_labels_that_fit(tmp_path: Path) -> None:
    top = kaggle(tmp_path / "kaggle")
    labels = top / "LOC_val_solution.csv"
    whole = labels.read_text()
    for text, told in (
        (whole.replace(SYNSETS[1], "n99999999"), "'n99999999' in .*LOC_val_solution.csv is not a class of "),
        (whole.replace("_val_00000003", "_val_00000009"), "has no line for ILSVRC2012_val_00000003.JPEG in "),
        (None, "val has 6 images, but no labels: put LOC_val_solution.csv"),
    ):
        labels.unlink() if text is None else labels.write_text(text)
        for reader in (open_dataset, survey):
            with pytest.raises(InputError, match=told):
                reader(str(top))
    (top / "ILSVRC/imagenet_2012_validation_synset_labels.txt").write_text("".join(f"{s}\n" for s in SYNSETS * 2))
    assert open_dataset(str(top)).val.labels.tolist() == [0, 1, 2, 0, 1, 2], "a synset a line, in the files' order"


def test_tiny_imagenet_is_read_as_it_unpacks(tmp_path: Path) -> None:
    """cs231n.stanford.edu/tiny-imagenet-200.zip: train/CLASS/images/*, val/images/*, val/val_annotations.txt."""
    boxes = {f"train/{synset}/{synset}_boxes.txt": b"n_0.JPEG\t0\t10\t63\t58\n" for synset in SYNSETS}
    train = {f"train/{synset}/images/{synset}_0.JPEG": jpeg(k) for k, synset in enumerate(SYNSETS)}
    others = {f"{split}/images/{split}_{i}.JPEG": jpeg(10 + i) for split in ("val", "test") for i in range(3)}
    lines = "".join(f"val_{i}.JPEG\t{SYNSETS[2 - i]}\t0\t32\t44\t62\n" for i in range(3))
    write_files(tmp_path, {**boxes, **train, **others, "val/val_annotations.txt": lines.encode()})
    assert counts(tmp_path) == (3, 3)
    assert open_dataset(str(tmp_path)).val.labels.tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("train", "val"), [("training", "validation"), ("Train", "Valid"), ("train", "dev"), ("Training", "Testing")]
)
def test_split_folders_have_other_usual_names(tmp_path: Path, train: str, val: str) -> None:
    folder = write_images(tmp_path / "images", train=3, val=2)
    (folder / "train").rename(folder / train)
    (folder / "val").rename(folder / val)
    assert counts(folder) == (9, 6) and not survey(str(folder)).notes, "no images are drawn for validation"


def test_two_folders_of_one_split_are_refused(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", train=3, val=2)
    (folder / "val").rename(folder / "valid")
    (folder / "validation").mkdir()
    with pytest.raises(InputError, match="has valid and validation: rename the right one to val"):
        survey(str(folder))


def example(**features: bytes | int | list[bytes] | list[int]) -> bytes:
    """A tf.train.Example of texts and integers, by example.proto and feature.proto."""
    entries = b""
    for name, value in features.items():
        values = value if isinstance(value, list) else [value]
        texts = b"".join(field(1, text) for text in values if isinstance(text, bytes))
        packed = b"".join(varint(number % (1 << 64)) for number in values if isinstance(number, int))
        held = field(1, texts) if texts else field(3, field(1, packed))
        entries += field(1, field(1, name.encode()) + field(2, held))
    return field(1, entries)


def tfds(folder: Path, *, names: bool) -> Path:
    """A data set as tensorflow_datasets writes it: its features image, label and file_name, no label (-1) in test."""
    folder.mkdir(parents=True)
    for split, count, shards in (("train", 8, 2), ("validation", 4, 1), ("test", 2, 1)):
        for shard in range(shards):
            records = [
                example(file_name=b"x.JPEG", image=jpeg(i), label=-1 if split == "test" else 2 * (i % 2) + names)
                for i in range(shard, count, shards)
            ]
            path = folder / f"imagenet2012-{split}.tfrecord-{shard:05d}-of-{shards:05d}"
            path.write_bytes(b"".join(map(record, records)))
    (folder / "dataset_info.json").write_text("{}")
    (folder / "features.json").write_text("{}")
    if names:
        (folder / "label.labels.txt").write_text("tench\nshark\nhen\ncat\n")
    return folder


def test_data_of_tensorflow_datasets_is_read(tmp_path: Path) -> None:
    folder = tfds(tmp_path / "data/imagenet2012/5.1.0", names=False)
    assert counts(folder) == (8, 4)
    dataset = open_dataset(str(folder))
    assert dataset.classes == ("0", "2") and dataset.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert dataset.train.read(5) == jpeg(3) and dataset.test is None
    assert dataset.notes == (f"{folder}: ignored 2 images of the test split without a label",)
    for above in (tmp_path / "data", tmp_path / "data/imagenet2012"):
        with pytest.raises(InputError, match=f"has TFRecords only in folders below it: give {folder}"):
            survey(str(above))


def test_their_class_names_are_taken_where_they_are_written(tmp_path: Path) -> None:
    dataset = open_dataset(str(tfds(tmp_path / "5.1.0", names=True)))
    assert dataset.classes == ("tench", "shark", "hen", "cat") and set(dataset.train.labels.tolist()) == {1, 3}


def test_lists_of_labels_may_have_a_mark_and_names_that_are_not_utf_8(tmp_path: Path) -> None:
    """As editors of Windows write them, and as other locales do."""
    folder = tfds(tmp_path / "5.1.0", names=True)
    (folder / "label.labels.txt").write_bytes(b"\xef\xbb\xbftench\nshark\nhen\nch\xe2t\n")
    assert open_dataset(str(folder)).classes == ("tench", "shark", "hen", "ch\udce2t")
    images = write_images(tmp_path / "images", classes=2, train=2, val=1)
    (images / "train/class1").rename(images / os.fsdecode(b"train/ch\xe2t"))
    for k, name in enumerate(("class0", "class1")):
        (images / f"val/{name}/000.jpg").rename(images / f"val/{k}.jpg")
        (images / f"val/{name}").rmdir()
    (images / "val/val_annotations.txt").write_bytes(b"\xef\xbb\xbf0.jpg ch\xe2t 0 0\n1.jpg class0 0 0\n")
    assert open_dataset(str(images)).val.labels.tolist() == [0, 1], "ch\udce2t comes before class0"


def test_records_of_other_names_and_keys_are_read(tmp_path: Path) -> None:
    """Those of the flowers on Kaggle (image, class, id; test images have no class), one folder for each split."""
    for split, first in (("train", 0), ("val", 3), ("test", 6)):
        (tmp_path / split).mkdir()
        label = {} if split == "test" else {"class": 0}
        records = [example(image=jpeg(first + i), id=b"x", **dict.fromkeys(label, i % 2)) for i in range(3)]
        (tmp_path / split / f"00-512x512-{first}.tfrec").write_bytes(b"".join(map(record, records)))
    assert counts(tmp_path) == (3, 3)
    assert open_dataset(str(tmp_path)).val.read(1) == jpeg(4)


def test_records_that_are_no_labeled_images_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train-00000-of-00001"
    for data, told in (
        (example(audio=b"x", label=1), "it has no image/encoded or image, but audio, label"),
        (
            example(image=jpeg(1), target=1, text=b"a dog"),
            "no image .* has a label in image/class/label or label or class, the first record has image, target, text: "
            "write the number of its class under one of these keys",
        ),
        (example(image=jpeg(1), label=-1), "the first record has image, label: write"),
        (example(image=jpeg(1), label=b"dog"), "its label is not an integer"),
        (example(image=jpeg(1), label=[0, 1]), "its label has 2 values, but an image has one class"),
        (example(image=jpeg(1), label=[]), "no image .* has a label in image/class/label or label or class"),
        (example(image=[jpeg(1), jpeg(2)], label=1), "it has 2 images as bytes"),
        (example(image=3, label=1), "it has 0 images as bytes"),
    ):
        path.write_bytes(record(data))
        with pytest.raises(InputError, match=told):
            survey(str(tmp_path))


@pytest.mark.parametrize(
    ("compress", "tool"),
    [(gzip.compress, "gzip -dc"), (zlib.compress, "pigz -dc"), (lambda d: zlib.compress(d, 1), "pigz")],
)
def test_compressed_records_are_called_so(tmp_path: Path, compress: Callable[[bytes], bytes], tool: str) -> None:
    path = tmp_path / "train-00000-of-00001"
    path.write_bytes(compress(record(example(image=jpeg(1), label=1))))
    with pytest.raises(InputError, match=f"is compressed, .*unpack each file with {tool}"):
        survey(str(tmp_path))
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(InputError, match="is not a TFRecord file"):
        survey(str(tmp_path))


def test_empty_shards_hold_nothing_and_are_counted(tmp_path: Path) -> None:
    folder = tfds(tmp_path / "in", names=False)
    for number in (2, 3):
        (folder / f"imagenet2012-train.tfrecord-{number:05d}-of-00004").touch()
    assert counts(folder) == (8, 4)
    assert f"{folder}: ignored 2 empty files of the train split" in survey(str(folder)).notes
    for path in folder.glob("*-validation*"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match="and the rest of its split have no image: is the download complete"):
        survey(str(folder))


def write_tars(folder: Path, label: Callable[[int], dict[str, Any]], *, train: int = 8, image: str = "jpg") -> Path:
    """Shards by webdataset's own writer."""
    folder.mkdir(parents=True)
    half = train // 2
    for split, shard, first, count in (("train", 0, 0, half), ("train", 1, half, half), ("validation", 0, 50, 4)):
        with webdataset.TarWriter(str(folder / f"imagenet1k-{split}-{shard:04d}.tar"), encoder=False) as sink:
            for i in range(first, first + count):
                sink.write({"__key__": f"n{i:04d}_x", image: jpeg(i), **label(i)})
    return folder


LABELS: dict[str, tuple[Callable[[int], dict[str, Any]], tuple[str, ...]]] = {
    "numbers": (lambda i: {"cls": str(3 * (i % 2) + 8).encode(), "json": b'{"label": 99}'}, ("8", "11")),
    "texts": (lambda i: {"cls": ("dog", "cat")[i % 2].encode() + b"\n"}, ("cat", "dog")),
    "in JSON": (lambda i: {"json": json.dumps({"label": i % 2, "width": 8}).encode(), "txt": b"a photo"}, ("0", "1")),
}


def test_absent_shards_and_those_of_other_formats_are_said(tmp_path: Path) -> None:
    folder = write_tars(tmp_path / "in", LABELS["texts"][0])
    assert not survey(str(folder)).notes
    for number in (3, 4):
        shutil.copy(folder / "imagenet1k-train-0001.tar", folder / f"imagenet1k-train-{number:04d}.tar")
    (folder / "imagenet1k-train-0002.tar.zst").touch()
    assert survey(str(folder)).notes == (
        f"{folder}: 1 number missing in 4 files imagenet1k-train-*.tar from 0 to 4; is the download complete?",
        f"{folder}: ignored imagenet1k-train-0002.tar.zst, because only tar files are read",
    )


def test_a_class_of_a_tar_may_have_joiners_and_other_spaces(tmp_path: Path) -> None:
    words = ("می\u200cروم", "chat\u00a0noir")
    folder = write_tars(tmp_path / "in", lambda i: {"cls": words[i % 2].encode()})
    assert open_dataset(str(folder)).classes == tuple(sorted(words))


def test_a_class_in_bytes_that_are_no_text_is_refused(tmp_path: Path) -> None:
    folder = write_tars(tmp_path / "in", lambda i: {"cls": (i % 2).to_bytes(8, "little")})
    with pytest.raises(InputError, match=r"cls in .* has no label: '\\x00.*' is neither a number nor a text"):
        survey(str(folder))


@pytest.mark.parametrize("how", LABELS)
def test_shards_of_webdataset_are_read(tmp_path: Path, how: str) -> None:
    label, classes = LABELS[how]
    folder = write_tars(tmp_path / "in", label)
    assert counts(folder) == (8, 4)
    dataset = open_dataset(str(folder))
    assert dataset.classes == classes
    assert dataset.train.labels.tolist() == [(i + (how == "texts")) % 2 for i in range(8)]
    assert [dataset.train.read(i) for i in range(8)] == [jpeg(i) for i in range(8)] and dataset.val.read(3) == jpeg(53)
    assert dataset.train.name(5) == f"{folder}/imagenet1k-train-0001.tar:n0005_x.jpg"


def test_tars_that_are_no_samples_of_classes_are_named(tmp_path: Path) -> None:
    captions = write_tars(tmp_path / "captions", lambda _i: {"txt": b"a photo"})
    pairs = write_tars(tmp_path / "pairs", lambda i: {"cls": b"1", "mask.png": png(i)})
    packed = tmp_path / "gz"
    packed.mkdir()
    with tarfile.open(packed / "train-0.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a.cls"), io.BytesIO(b""))
    nothing = write_tars(tmp_path / "nothing", lambda _i: {"cls": b"1"}, train=0)
    archives = tmp_path / "archives"
    archives.mkdir()
    (archives / "ILSVRC2012_img_train.tar").touch()
    for folder, told in (
        (captions, r"train-0000.tar has n0000_x.jpg, n0000_x.txt, but a sample is one image, .* its class in KEY.cls"),
        (packed, r"train-0.tar.gz is gzipped, .*: unpack it with gunzip"),
        (nothing, "train-0000.tar and the rest of its split have no image: is the download complete"),
        (archives, "has ILSVRC2012_img_train.tar: pack it with cputrain prepare imagenet "),
    ):
        with pytest.raises(InputError, match=told):
            survey(str(folder))
    assert counts(pairs) == (8, 4), "a mask beside an image has a longer suffix"


def test_a_tar_with_a_damaged_header_is_refused(tmp_path: Path) -> None:
    folder = write_tars(tmp_path / "in", lambda i: {"cls": str(i % 2).encode()})
    path = folder / "imagenet1k-train-0000.tar"
    with tarfile.open(path) as tar:
        header = tar.getmembers()[2].offset  # tarfile takes what is wrong there for the end
    data = path.read_bytes()
    for damaged in (data[: header + 99], data[:header] + b"x" * 512 + data[header + 512 :]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=rf"cannot read .*no header at byte {header:,}; is the download complete"):
            survey(str(folder))


def test_tars_without_a_sample_are_passed_over_and_named(tmp_path: Path) -> None:
    folder = write_tars(tmp_path / "in", lambda i: {"cls": str(i % 2).encode()})
    (folder / "imagenet1k-train-0002.tar").touch()
    with webdataset.TarWriter(str(folder / "imagenet1k-validation-0001.tar")):
        pass  # two blocks of zeros
    assert counts(folder) == (8, 4)
    dataset = open_dataset(str(folder))
    assert (
        dataset.notes
        == survey(str(folder)).notes
        == (
            f"{folder}: no image in imagenet1k-train-0002.tar of the train split",
            f"{folder}: no image in imagenet1k-validation-0001.tar of the val split",
        )
    )
    assert [dataset.train.read(i) for i in range(8)] == [jpeg(i) for i in range(8)] and dataset.val.read(3) == jpeg(53)
    (folder / "imagenet1k-validation-0000.tar").write_bytes(b"")
    with pytest.raises(InputError, match=r"validation-0000\.tar and the rest of its split have no image"):
        survey(str(folder))


def test_images_without_labels_are_left_out_and_negative_classes_are_refused(tmp_path: Path) -> None:
    blind = write_tars(tmp_path / "blind", lambda i: {"cls": b"-1" if i >= 50 else str(i % 2).encode()})
    assert detect_source(blind).splits.keys() == {"train"}
    assert detect_source(blind).notes == (f"{blind}: ignored 4 images of the val split without a label",)
    mixed = [
        write_tars(
            tmp_path / f"mixed{label}", lambda i, n=label: {"json": json.dumps({"label": (0, n)[i % 2]}).encode()}
        )
        for label in (-1, -7)
    ]
    assert [split.images for split in detect_source(mixed[0]).splits.values()] == [4, 2]
    assert detect_source(mixed[0]).notes[0] == f"{mixed[0]}: ignored 4 images of the train split without a label"
    with pytest.raises(InputError, match=r"has samples with label -7, but a label must be 0 or higher"):
        detect_source(mixed[1])


@pytest.mark.parametrize("label", [None, [1, 2], True, 1.5, ""])
def test_a_label_in_json_is_a_number_or_a_text(tmp_path: Path, label: object) -> None:
    folder = write_tars(tmp_path / "in", lambda _: {"json": json.dumps({"label": label}).encode()})
    with pytest.raises(InputError, match=r"n0000_x\.json in .* has no label: .* is neither a number nor a text"):
        open_dataset(str(folder))


def test_prepared_shards_without_their_manifest_are_webdataset_s(tmp_path: Path) -> None:
    write_images(tmp_path / "images", train=4, val=2)
    assert here("prepare", "imagefolder", "images", "out", cwd=tmp_path).returncode == 0
    whole = open_dataset(str(tmp_path / "out"))
    (tmp_path / "out/manifest.json").unlink()
    again = open_dataset(str(tmp_path / "out"))
    assert again.train.labels.tolist() == whole.train.labels.tolist() and again.classes == ("0", "1", "2")
    assert [again.val.read(i) for i in range(6)] == [whole.val.read(i) for i in range(6)]


def table(**columns: Any) -> Any:
    return pyarrow.table(columns)


def views(first: int, count: int) -> Any:
    """As polars 1.38 writes tables: view types for bytes and texts."""
    image = pyarrow.array([png(i) for i in range(first, first + count)], pyarrow.binary_view())
    return table(
        image=image, label=pyarrow.array(["dog" if i % 2 else "cat" for i in range(count)], pyarrow.string_view())
    )


def test_tables_of_polars_are_read(tmp_path: Path) -> None:
    parquet.write_table(views(0, 6), tmp_path / "train-0.parquet", row_group_size=4)
    parquet.write_table(views(6, 2), tmp_path / "validation-0.parquet")
    assert str(parquet.ParquetFile(tmp_path / "train-0.parquet").schema_arrow.field("image").type) == "binary_view"
    assert counts(tmp_path) == (6, 2)
    dataset = open_dataset(str(tmp_path))
    assert dataset.classes == ("cat", "dog") and dataset.train.labels.tolist() == [0, 1] * 3
    assert dataset.train.read(5) == png(5) and dataset.val.read(1) == png(7)
    categories = table(image=[png(i) for i in range(4)], label=pyarrow.array(["b", "a", "b", "a"]).dictionary_encode())
    parquet.write_table(categories, tmp_path / "train-0.parquet")
    parquet.write_table(categories, tmp_path / "validation-0.parquet")
    assert open_dataset(str(tmp_path)).train.labels.tolist() == [1, 0, 1, 0]


def test_arrow_files_are_read_in_both_of_their_formats(tmp_path: Path) -> None:
    """polars' write_ipc and Feather write the file format, `datasets` the stream."""
    rows = table(image=[png(i) for i in range(4)], label=[0, 1, 0, 1])
    with pyarrow.OSFile(str(tmp_path / "train.feather"), "wb") as out, pyarrow.ipc.new_file(out, rows.schema) as file:
        file.write_table(rows)
    with pyarrow.OSFile(str(tmp_path / "test.arrow"), "wb") as out, pyarrow.ipc.new_stream(out, rows.schema) as stream:
        stream.write_table(rows)
    assert counts(tmp_path) == (4, 4) and open_dataset(str(tmp_path)).train.read(3) == png(3)


def test_a_column_of_paths_is_read_from_beside_the_table(tmp_path: Path) -> None:
    write_files(tmp_path, {f"photos/{i}.png": png(i) for i in range(4)})
    rows = table(file_name=[f"photos/{i}.png" for i in range(4)], label=["a", "b", "a", "b"])
    for split in ("train", "validation"):
        parquet.write_table(rows, tmp_path / f"{split}.parquet")
    assert counts(tmp_path) == (4, 4) and open_dataset(str(tmp_path)).train.read(2) == png(2)
    parquet.write_table(table(text=["a", "b"], label=[0, 1]), tmp_path / "train.parquet")
    told = r"has no column of images \(bytes, .*paths of files\): its columns are text \(string\), label \(int64\)"
    with pytest.raises(InputError, match=told):
        survey(str(tmp_path))


def test_a_table_in_a_split_s_folder_has_the_paths_of_images_in_it(tmp_path: Path) -> None:
    """metadata.parquet of an imagefolder on the Hugging Face Hub: file_name is relative to it."""
    for split, first in (("train", 0), ("test", 4)):
        write_files(tmp_path, {f"{split}/{i}.png": png(first + i) for i in range(4)})
        rows = table(file_name=[f"{i}.png" for i in range(4)], label=["a", "b", "a", "b"])
        parquet.write_table(rows, tmp_path / split / "metadata.parquet")
    dataset = open_dataset(str(tmp_path))
    assert counts(tmp_path) == (4, 4) and dataset.train.read(2) == png(2) and dataset.val.read(2) == png(6)


def test_rows_without_a_label_are_left_out_and_counted(tmp_path: Path) -> None:
    labels = pyarrow.array([0, None, 1, -1, 0, None], pyarrow.int64())
    rows = table(image=[png(i) for i in range(6)], label=labels)
    parquet.write_table(rows, tmp_path / "train.parquet")
    parquet.write_table(rows.slice(0, 1), tmp_path / "validation.parquet")
    parquet.write_table(rows.slice(0, 0), tmp_path / "train-more.parquet")
    dataset = open_dataset(str(tmp_path))
    assert dataset.classes == ("-1", "0", "1"), "where -1 is among the values, it is one"
    assert counts(tmp_path) == (4, 1) and dataset.train.labels.tolist() == [1, 2, 0, 1]
    assert [dataset.train.read(i) for i in range(4)] == [png(i) for i in (0, 2, 3, 4)]
    assert dataset.notes == (
        f"{tmp_path}: label -1 in column label is used as a class; remove its rows if it is none",
        f"{tmp_path}: ignored 2 images of the train split without a label",
    )
    for first, count, told in (
        (1, 1, "no image .* has a label in column label"),
        (0, 0, "have no image: is the download"),
    ):
        for name in ("train", "train-more"):
            parquet.write_table(rows.slice(first, count), tmp_path / f"{name}.parquet")
        with pytest.raises(InputError, match=told):
            survey(str(tmp_path))


def two_splits(folder: Path, rows: Any, name: str = "{}.parquet") -> Path:
    """The same rows as training and validation files."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        parquet.write_table(rows, folder / name.format(split))
    return folder


def test_parquet_as_tensorflow_datasets_numbers_it_is_read(tmp_path: Path) -> None:
    """`tfds build --file_format=parquet` names its files as it does TFRecords."""
    rows = table(image=[png(i) for i in range(4)], label=[0, 1, 0, 1])
    for k in range(2):
        two_splits(tmp_path, rows, f"imagenet2012-{{}}.parquet-{k:05d}-of-00002")
    assert counts(tmp_path) == (8, 8) and open_dataset(str(tmp_path)).train.read(6) == png(2)


def test_structs_of_paths_alone_are_images(tmp_path: Path) -> None:
    """What `datasets` has of an Image that is not embedded."""
    write_files(tmp_path, {f"photos/{i}.png": png(i) for i in range(4)})
    two_splits(tmp_path, table(image=[{"path": f"photos/{i}.png"} for i in range(4)], label=[0, 1, 0, 1]))
    assert counts(tmp_path) == (4, 4) and open_dataset(str(tmp_path)).train.read(2) == png(2)


@pytest.mark.parametrize("labels", [[0.0, 1.0], [[0], [1]]], ids=["floats", "lists"])
def test_labels_of_other_types_are_named_with_what_is_expected(tmp_path: Path, labels: list[Any]) -> None:
    folder = two_splits(tmp_path, table(image=[png(0), png(1)], label=labels))
    found = r"image \(binary\), label \((double|list<(element|item): int64>)\)"
    told = rf"no column of labels \(whole numbers or texts, one .*: its columns are {found}"
    with pytest.raises(InputError, match=told):
        survey(str(folder))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22ea\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("train-00000-of-00001.parquet", "git lfs pull"),
        ("train.arrow", "git lfs pull"),
        ("train-00000-of-00001", "git lfs pull"),
        ("train-0.tar", "git lfs pull"),
        ("manifest.json", "git lfs pull"),
        ("imagenet2012-train.array_record-00000-of-00001", "tfds convert_format .*--out_file_format=tfrecord"),
        ("train.riegeli", "tfds convert_format .*--out_file_format=tfrecord"),
        ("images.zip", "unpack the archive"),
        ("images.tar.xz", "unpack the archive, .*; tar files whose samples are KEY.jpg"),
        ("data.mdb", "it is an LMDB, .*; with the Python package lmdb and that program, convert its images"),
        ("ilsvrc12_train_lmdb", "it is an LMDB"),
        ("train.lmdb-lock", "it is an LMDB"),
        ("shard.00000.mds.zstd", "of MosaicML's streaming or of LitData; with that package, convert its images"),
        ("chunk-0-12.bin", "or of LitData; with that package, convert its images"),
        ("train_data_batch_10", "convert its images to files in class folders"),
        ("train.rec", "convert its images to files in class folders"),
        ("train.h5", "convert its images to files in class folders"),
    ],
)
def test_a_file_that_is_not_read_is_named_with_what_to_do(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(InputError, match=rf"{name}.*{told}"):
        survey(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("images.zip", "unpack the archive"),
        ("images.tar.gz", "unpack the archive, .*; tar files whose samples are KEY.jpg and KEY.cls are read"),
        ("train.parquet", "give the folder that it is in"),
    ],
)
def test_a_file_in_place_of_the_folder_is_answered_by_its_kind(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(InputError, match=f"{name} is a file: {told}"):
        survey(str(tmp_path / name))


@pytest.mark.parametrize("name", ["data.mdb", "shard.00000.mds", "chunk-0-0.bin"])
def test_a_folder_of_a_split_is_answered_by_its_files(tmp_path: Path, name: str) -> None:
    """As LMDBs of each split lie, and data sets of MosaicML and LitData, which begin with an index.json."""
    write_files(tmp_path, {f"{split}/{file}": b"x" for split in ("train", "val") for file in ("index.json", name)})
    told = rf"train has no class folders, but (index.json, {name}|{name}, index.json): it is a.* (LMDB|of MosaicML's)"
    with pytest.raises(InputError, match=told):
        survey(str(tmp_path))


@pytest.mark.parametrize(
    ("folder", "files", "told"),
    [
        (
            "cifar-10-batches-py",
            ("batches.meta", "data_batch_1", "test_batch"),
            "images of CIFAR10 as pickled arrays: pack them with cputrain prepare torchvision:CIFAR10 {} OUT,",
        ),
        (
            "cifar",
            ("data_batch_1", "test_batch"),
            "CIFAR10 as pickled arrays: rename it to {}/cifar-10-batches-py, and pack them with .*:CIFAR10 {} OUT,",
        ),
        ("cifar-100-python", ("meta", "train", "test"), "CIFAR100 as pickled arrays: pack them .*:CIFAR100 {} OUT,"),
        (
            "cifar-10-batches-bin",
            ("data_batch_1.bin", "test_batch.bin"),
            "fetch and pack these .*:CIFAR10 DIR OUT",
        ),
        ("stl10_binary", ("train_X.bin", "train_y.bin"), "pack them with cputrain prepare torchvision:STL10 {} OUT,"),
        ("svhn", ("train_32x32.mat", "test_32x32.mat"), "pack them with .* torchvision:SVHN {}/svhn OUT, and give OUT"),
    ],
)
def test_arrays_that_torchvision_reads_are_named_with_the_command_that_packs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, files: tuple[str, ...], told: str
) -> None:
    """The folder itself, also as the working folder, or the one above it."""
    write_files(tmp_path, {f"{folder}/{name}": b"x" for name in files})
    monkeypatch.chdir(tmp_path / folder)
    for path in (tmp_path, tmp_path / folder, Path()):
        with pytest.raises(InputError, match=told.replace("{}", str(tmp_path))):
            survey(str(path))


@pytest.mark.parametrize("folder", ["photos", "101_ObjectCategories"])
def test_images_in_the_only_folder_of_a_folder_are_named(tmp_path: Path, folder: str) -> None:
    images = write_images(tmp_path / folder, train=3, val=2)
    (tmp_path / "readme.txt").touch()
    if folder != "photos":
        (images / "train").rename(tmp_path / "classes")
        shutil.rmtree(images)
        (tmp_path / "classes").rename(images)
    with pytest.raises(InputError, match=f"has no train/ folder, but {folder}, readme.txt: give {images}$"):
        survey(str(tmp_path))


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        ("{split}/{part}", "train has images, labels, which are parts of a detection or segmentation data set"),
        ("{part}/{split}", "has images, labels, which are parts of a detection .*, not classes"),
    ],
)
def test_a_data_set_of_boxes_is_no_set_of_classes(tmp_path: Path, folder: str, told: str) -> None:
    """As Ultralytics and Roboflow have them."""
    for split in ("train", "val"):
        for part, data in (("images/0.jpg", jpeg(0)), ("labels/0.txt", b"0 .5 .5 .1 .1")):
            name, _, file = part.partition("/")
            write_files(tmp_path, {f"{folder.format(split=split, part=name)}/{file}": data})
    with pytest.raises(InputError, match=told):
        survey(str(tmp_path))


def test_a_table_of_labels_beside_the_images_of_a_split_is_named(tmp_path: Path) -> None:
    """An imagefolder of the Hugging Face Hub with metadata."""
    for split in ("train", "test"):
        write_files(tmp_path, {f"{split}/{i}.jpg": jpeg(i) for i in range(3)} | {f"{split}/metadata.csv": b""})
    with pytest.raises(InputError, match=r"not classes: .*, perhaps by test/metadata\.csv, train/metadata\.csv"):
        survey(str(tmp_path))


def test_tables_deep_below_the_folder_are_found(tmp_path: Path) -> None:
    """As `datasets` keeps them: NAME/CONFIGURATION/VERSION/HASH/*.arrow."""
    folder = two_splits(tmp_path / "cache/user___beans/default/0.0.0/3f2a", table(image=[png(0)], label=[0]))
    with pytest.raises(InputError, match=f"Parquet or Arrow files only in folders below it: give {folder}$"):
        survey(str(tmp_path / "cache"))


@pytest.mark.parametrize("train", ["train", "training", ""])
def test_an_archive_inside_a_class_is_no_data_set(tmp_path: Path, train: str) -> None:
    images = write_images(tmp_path / "in", train=3, val=1) / "train"
    folder = images.rename(tmp_path / "data") if not train else images.parent
    if train:
        images.rename(folder / train)
    (folder / train / "class0/raw").mkdir()
    tarfile.open(folder / train / "class0/raw/more.tar", "w").close()
    found = survey(str(folder))
    assert found.train + found.val == (12 if train else 9)


def test_an_archive_of_class_folders_is_no_tar_of_samples(tmp_path: Path) -> None:
    write_images(tmp_path / "images", train=2, val=1)
    for kind, told in (("w", "unpack the archive with tar -xf"), ("w:gz", "or with tar -xzf if it has class folders")):
        folder = tmp_path / f"packed{kind[1:]}"
        folder.mkdir()
        with tarfile.open(folder / ("images.tar" if kind == "w" else "images.tar.gz"), kind) as tar:
            tar.add(tmp_path / "images", "./")
        with pytest.raises(InputError, match=told):
            survey(str(folder))


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"jpg": jpeg(0), "png": png(0), "cls": b"1"}, "a sample is one image"),
        ({"jpg": jpeg(0), "json": b'{"class": 1, "width": 8}'}, "0.json in .* has no label: it has class, width"),
        ({"jpg": jpeg(0), "json": b"[1]"}, "0.json in .* has no label: it is not a JSON object"),
        ({"jpg": jpeg(0), "cls.txt": b"1"}, "and its class in KEY.cls or KEY.json"),
    ],
)
def test_samples_of_other_parts_are_named(tmp_path: Path, entries: dict[str, bytes], told: str) -> None:
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for suffix, data in entries.items():
            member = tarfile.TarInfo(f"./0.{suffix}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    with pytest.raises(InputError, match=told):
        survey(str(tmp_path))


def test_a_list_of_labels_that_is_a_pointer_is_no_list(tmp_path: Path) -> None:
    folder = tfds(tmp_path / "5.1.0", names=True)
    (folder / "label.labels.txt").write_bytes(POINTER)
    with pytest.raises(InputError, match=r"label\.labels\.txt is a git-LFS pointer"):
        open_dataset(str(folder))


def test_links_in_a_circle_end_and_a_link_to_no_folder_is_refused(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", train=3, val=2)
    inside = folder / "train/class0"
    for name, other in (("a", "b"), ("b", "a")):
        (inside / name).mkdir()
        (inside / name / other).symlink_to(inside / other)
    (inside / "self").symlink_to("self")
    (inside / "self.jpg").symlink_to("self.jpg")
    assert counts(folder) == (10, 6), "a link to itself is a file that cannot be read"
    (folder / "train/class9").symlink_to(tmp_path / "unmounted")
    with pytest.raises(InputError, match=r"cannot read .*train/class9: No such file"):
        survey(str(folder))
