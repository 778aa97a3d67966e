"""Folders with several things in them: tables, tar files and archives beside class folders, img2dataset's shards."""

import io
import json
import os
import sys
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from cputrain.affinity.errors import InputError
from cputrain.cli import main
from cputrain.data.formats.open import detect_source, open_dataset
from cputrain.data.loader import ImageLoader
from tests.support.commands import optional
from tests.support.images import jpeg, png, write_files

pyarrow = optional("pyarrow", "parquet")
parquet = optional("pyarrow.parquet", "parquet")
feather = optional("pyarrow.feather", "parquet")
PATHS = [f"train/{name}/{i}.png" for name in ("cat", "dog") for i in range(6)]
NAMES = [Path(path).parent.name for path in PATHS]
BYTES = [png(10 * i) for i in range(12)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """train/CLASS/* and val/CLASS/* of two classes."""
    others = [path.replace("train", "val") for path in PATHS]
    return write_files(tmp_path / "photos", dict(zip(PATHS + others, BYTES * 2, strict=True)))


def table(path: Path, /, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write = feather.write_feather if path.suffix == ".feather" else parquet.write_table
    write(pyarrow.table(columns), path)


def tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as out:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))


def samples(label: Callable[[int], tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    pairs = ((("jpg", jpeg(i)), label(i)) for i in range(8))
    return [(f"{i:09}.{suffix}", data) for i, pair in enumerate(pairs) for suffix, data in pair]


def of_class(i: int) -> tuple[str, bytes]:
    return "cls", str(i % 2).encode()


STRAY: dict[str, dict[str, Any]] = {
    "stats.parquet": {"n": [1], "mean": [0.5]},
    "embeddings.parquet": {"path": PATHS, "values": [[0.1]] * 12},
    "packed.parquet": {"key": PATHS, "values": [b"\0\1\2\3"] * 12},
    "sizes.parquet": {"filename": PATHS, "width": [1] * 12, "height": [2] * 12},
    "elsewhere.parquet": {"path": [f"old/{i}.png" for i in range(12)], "label": NAMES},
    "thumbnails.parquet": {"image": BYTES},
    "test.parquet": {"image": BYTES, "label": NAMES},
    "history.feather": {"epoch": [1, 2]},
    "train/history.parquet": {"epoch": [1, 2]},
    "data/history.parquet": {"epoch": [1, 2]},
    "index.parquet": {"path": PATHS, "label": NAMES},
    "licenses.parquet": {"path": PATHS, "license": ["cc0"] * 12},
    "captions.parquet": {"path": PATHS, "caption": [f"photo {i} of a pet" for i in range(12)]},
    "some.parquet": {"path": PATHS[:5], "caption": ["a pet", *(f"photo {i} of a pet" for i in range(3)), "a pet"]},
    "structs.parquet": {"image": [{"bytes": None, "path": path} for path in PATHS], "label": NAMES},
}


@pytest.mark.parametrize("name", STRAY)
def test_a_table_that_is_no_other_data_set_is_ignored_and_named(folder: Path, name: str) -> None:
    table(folder / name, **STRAY[name])
    dataset = open_dataset(str(folder))
    assert (dataset.classes, len(dataset.train), len(dataset.val)) == (("cat", "dog"), 12, 12)
    assert dataset.notes == (f"{folder}: ignored {name}, because only class folders are read",)


@pytest.mark.parametrize("start", ["absolute", "relative", "link"])
def test_a_table_of_absolute_paths_that_repeats_the_class_folders_is_ignored(
    folder: Path, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(folder / "index.parquet", path=[str(folder / path) for path in PATHS], label=NAMES)
    monkeypatch.chdir(folder.parent)
    Path("linked").symlink_to(folder)
    place = {"absolute": folder, "relative": Path("photos"), "link": Path("linked")}[start]
    dataset = open_dataset(str(place))
    assert (dataset.classes, len(dataset.train)) == (("cat", "dog"), 12)
    assert dataset.notes == (f"{place}: ignored index.parquet, because only class folders are read",)
    table(folder / "stats.parquet", n=[1], mean=[0.5])
    assert detect_source(place).notes == (
        f"{place}: ignored index.parquet, stats.parquet, because only class folders are read",
    )
    table(folder / "index.parquet", path=[str(folder / path) for path in PATHS], label=OTHER_LABELS)
    with pytest.raises(InputError, match=r"as class folders .* and as Parquet or Arrow files"):
        detect_source(place)


@pytest.mark.parametrize(
    "name",
    ["x.parquet", "train.tfrecord", "manifest.json", "labels.csv", "photos.zip", "train/metadata.jsonl", "backup.tar"],
)
def test_other_files_beside_class_folders_are_ignored_and_named(
    folder: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_bytes(b'{"name": "photos"}')
    note = f"{folder}: ignored {name}, because only class folders are read"
    found, *more = open_dataset(str(folder)).notes
    assert found == note
    if name == "x.parquet":
        assert more[0].startswith(f"{folder}: it is unknown whether the Parquet or Arrow files are another data set: ")
    assert len(more) == (name == "x.parquet")
    assert main(["prepare", "imagefolder", str(folder), str(tmp_path / "out")]) == 0
    assert note in capsys.readouterr().out


def test_tables_that_cannot_be_read_without_pyarrow_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table(folder / "labels.parquet", path=PATHS, label=list(reversed(NAMES)))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    ignored, unknown = open_dataset(str(folder)).notes
    assert ignored == f"{folder}: ignored labels.parquet, because only class folders are read"
    assert unknown.startswith(f"{folder}: it is unknown whether the Parquet or Arrow files are another data set: ")
    assert "labels.parquet needs pyarrow: pip install 'cputrain[parquet]'" in unknown


@pytest.mark.parametrize("name", ["train.tar", "photos.tgz"])
def test_the_archive_of_the_class_folders_is_ignored_and_named(folder: Path, name: str) -> None:
    for root, sizes in ((folder, (12, 12)), (folder / "train", (10, 2))):
        tar(root / name, zip(PATHS, BYTES, strict=True))
        dataset = open_dataset(str(root))
        assert (len(dataset.train), len(dataset.val)) == sizes
        assert dataset.notes[0] == f"{root}: ignored {name}, because only class folders are read"
        (root / name).unlink()


OTHER_LABELS = list(reversed(NAMES))
TWO_TABLES = {
    "paths": {"path": PATHS, "label": OTHER_LABELS},
    "numbers": {"file_name": PATHS, "label": [0, 1] * 6},
    "bytes": {"image": BYTES, "label": OTHER_LABELS},
    "several": {"image": BYTES, "coarse": NAMES, "fine": OTHER_LABELS},
    "part": {"path": PATHS[3:9], "label": NAMES[3:9]},
    "structs": {"image": [{"bytes": None, "path": path} for path in PATHS], "label": OTHER_LABELS},
}


@pytest.mark.parametrize("kind", TWO_TABLES)
def test_class_folders_and_another_table_are_refused_with_both(folder: Path, kind: str, tmp_path: Path) -> None:
    table(folder / "labels.parquet", **TWO_TABLES[kind])
    told = (
        r"photos has images with labels as class folders \(train/cat, train/dog\) and as Parquet or Arrow files "
        r"\(labels.parquet, images in column .*\): move one .* cputrain prepare imagefolder or parquet .*photos OUT"
    )
    with pytest.raises(InputError, match=told):
        detect_source(folder)
    assert main(["prepare", "imagefolder", str(folder), str(tmp_path / "folders")]) == 0
    assert open_dataset(str(tmp_path / "folders")).classes == ("cat", "dog")
    column = "fine" if kind == "several" else "label"
    assert main(["prepare", "parquet", str(folder), str(tmp_path / "table"), "--label-column", column]) == 0
    chosen = ImageLoader.open(folder, label_column=column, batch_size=2, image_size=8)
    assert chosen.classes == open_dataset(str(tmp_path / "table")).classes


def test_class_folders_and_samples_of_classes_in_tar_files_are_refused(folder: Path) -> None:
    for root, named in ((folder, "train/cat, train/dog"), (folder / "train", "cat, dog")):
        tar(root / "train-0000.tar", samples(of_class))
        with pytest.raises(InputError, match=rf"class folders \({named}\) and as tar files \(train-0000.tar\)"):
            detect_source(root)
        (root / "train-0000.tar").unlink()


def test_two_formats_of_files_are_refused_or_the_only_complete_one_is_read(tmp_path: Path) -> None:
    tar(tmp_path / "train-0000.tar", samples(of_class))
    table(tmp_path / "train-0000.parquet", key=["0"], path=["x.jpg"], label=["a"])
    assert detect_source(tmp_path).notes == (
        f"{tmp_path}: ignored train-0000.parquet, because only tar files are read",
    )
    table(tmp_path / "train-0000.parquet", image=BYTES, label=NAMES)
    with pytest.raises(InputError, match=r"as Parquet or Arrow files .* and as tar files \(train-0000.tar\): move one"):
        detect_source(tmp_path)


def test_a_table_without_images_beside_tables_of_images_is_ignored_and_named(tmp_path: Path) -> None:
    table(tmp_path / "photos.parquet", image=BYTES, label=NAMES)
    table(tmp_path / "a.parquet", n=[1])
    dataset = open_dataset(str(tmp_path))
    assert (
        len(dataset.train) == 10
        and f"{tmp_path}: ignored tables without a column of images, a.parquet" in dataset.notes
    )


def test_images_in_no_split_s_folder_are_named(folder: Path) -> None:
    write_files(
        folder, {"extra/cat/0.png": png(0), "more/0.png": png(0), "docs/readme.txt": b"", "old/train/red/0.png": png(0)}
    )
    (note,) = detect_source(folder).notes
    assert note == f"{folder}: ignored the images in extra, more, old, which are in no split's folder"


def img2dataset(root: Path, **extra: list[Any]) -> None:
    """What img2dataset writes as tar files, here two shards of 8 images."""

    def metadata(i: int) -> tuple[str, bytes]:
        return "json", json.dumps(
            {"caption": f"photo {i}", "key": str(i), **{k: v[i] for k, v in extra.items()}}
        ).encode()

    for shard in ("00000", "00001"):
        tar(root / f"{shard}.tar", samples(metadata))
        keys = [f"{i:09}" for i in range(8)]
        table(root / f"{shard}.parquet", url=["u"] * 8, key=keys, status=["success"] * 8, sha256=[b"\0"] * 8, **extra)
        (root / f"{shard}_stats.json").write_text("{}")


def test_img2dataset_s_tar_files_are_read_and_packed(tmp_path: Path) -> None:
    root = tmp_path / "laion"
    root.mkdir()
    img2dataset(root, label=["cat", "dog"] * 4)
    dataset = open_dataset(str(root))
    assert dataset.classes == ("cat", "dog") and (len(dataset.train), len(dataset.val)) == (13, 3)
    assert dataset.notes[0] == f"{root}: ignored 00000.parquet, 00001.parquet, because only tar files are read"
    assert main(["prepare", "webdataset", str(root), str(tmp_path / "out")]) == 0
    assert open_dataset(str(tmp_path / "out")).classes == ("cat", "dog")


def test_img2dataset_s_tar_files_without_classes_and_its_folders_are_refused(tmp_path: Path) -> None:
    for name in ("tars", "files"):
        (tmp_path / name).mkdir()
    img2dataset(tmp_path / "tars")
    with pytest.raises(InputError, match=r"000000000.json in .*/00000.tar has no label: it has caption, key"):
        detect_source(tmp_path / "tars")
    for shard in ("00000", "00001"):
        write_files(tmp_path / "files", {f"{shard}/{i}.jpg": jpeg(i) for i in range(4)})
        table(tmp_path / f"files/{shard}.parquet", key=["0"], url=["u"])
    with pytest.raises(InputError, match=r"files has 00000, 00001, which are shards of img2dataset, not classes"):
        detect_source(tmp_path / "files")


def test_images_in_folders_beside_files_with_images_are_named(tmp_path: Path) -> None:
    """Validation images in class folders beside a table, and a class at a greater depth than class folders have."""
    write_files(tmp_path, {"val/cat/0.png": BYTES[0], "val/dog/0.png": BYTES[1], "cat/2024/0.png": BYTES[2]})
    table(tmp_path / "train.parquet", image=BYTES, label=NAMES)
    assert f"{tmp_path}: ignored the images in cat, val, because only Parquet or Arrow files are read" in (
        open_dataset(str(tmp_path)).notes
    )


@pytest.mark.parametrize("image", [lambda path: path, lambda path: {"bytes": None, "path": path}])
def test_images_that_a_table_names_are_not_named_as_ignored(image: Callable[[str], object], tmp_path: Path) -> None:
    paths = [f"images/{i}.png" for i in range(12)]
    write_files(tmp_path, dict(zip(paths, BYTES, strict=True)))
    table(tmp_path / "train.parquet", image=[image(path) for path in paths], label=NAMES)
    assert not any("ignored" in note for note in open_dataset(str(tmp_path)).notes)


def test_a_file_s_split_is_the_word_before_a_number(tmp_path: Path) -> None:
    """As in Kaggle's TFRecords; else the images of all splits would be trained on."""
    for split in ("train", "val", "test"):
        tar(tmp_path / f"flowers_{split}00-8.tar", samples(of_class))
    dataset = open_dataset(str(tmp_path))
    assert [len(images) for images in dataset.splits.values()] == [8, 8, 8]


@pytest.mark.parametrize("suffix", ["parquet", "feather"])
def test_names_of_tables_may_have_any_bytes(suffix: str, tmp_path: Path) -> None:
    table(tmp_path / f"t.{suffix}", image=BYTES, label=NAMES)
    (tmp_path / f"t.{suffix}").rename(
        os.fsdecode(os.fsencode(tmp_path) + f"/caf\udce9.{suffix}".encode(errors="surrogateescape"))
    )
    assert open_dataset(str(tmp_path)).classes == ("cat", "dog")


def test_folders_named_by_a_digit_are_classes_also_beside_a_table_of_that_name(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{label}/{i}.png": BYTES[i] for label in (0, 1) for i in range(12)})
    table(tmp_path / "0.parquet", n=[1])
    dataset = open_dataset(str(tmp_path))
    assert dataset.classes == ("0", "1")
    assert f"{tmp_path}: ignored 0.parquet, because only class folders are read" in dataset.notes


def test_a_class_folder_named_as_an_image_is_no_image_outside(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{name}/{i}.png": BYTES[i] for name in ("a.png", "b") for i in range(12)})
    assert not any("outside" in note for note in open_dataset(str(tmp_path)).notes)
