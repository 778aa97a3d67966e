"""Parquet and Arrow files of images, as Hugging Face `datasets` writes them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cputrain.affinity.errors import InputError
from cputrain.cli import main
from cputrain.data.formats import tables
from cputrain.data.formats.open import TABLES, detect_source, open_dataset, table_files
from cputrain.data.formats.tables import TableImages
from cputrain.data.loader import ImageLoader
from tests.support.commands import optional
from tests.support.images import png, survey, write_files

pyarrow = optional("pyarrow", "parquet")
parquet = optional("pyarrow.parquet", "parquet")
NAMES = ["cat", "dog", "owl"]


def table_of(first: int, count: int, **columns: Any) -> Any:
    """Rows as the Hub has them: images of brightness `first`, `first` + 1, ..., labels with names in the metadata."""
    image = pyarrow.array([{"bytes": png(i), "path": f"{i}.png"} for i in range(first, first + count)])
    label = pyarrow.array([i % 3 for i in range(first, first + count)], pyarrow.int64())
    table = pyarrow.table({"image": image, "label": label} | columns)
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": NAMES}}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A folder as downloaded from the Hub: two training files of 20 rows in groups of 6, one for validation, and test
    images without labels."""
    data = tmp_path / "hub/data"
    data.mkdir(parents=True)
    for number in range(2):
        file = data / f"train-0000{number}-of-00002.parquet"
        parquet.write_table(table_of(20 * number, 20), file, row_group_size=6)
    parquet.write_table(table_of(40, 9), data / "validation-00000-of-00001.parquet")
    parquet.write_table(table_of(50, 3, label=pyarrow.array([-1] * 3)), data / "test-00000-of-00001.parquet")
    return tmp_path / "hub"


def test_files_from_the_hub_are_read_with_their_classes_and_splits(hub: Path) -> None:
    dataset, summary = open_dataset(str(hub)), survey(str(hub))
    assert dataset.classes == summary.classes == tuple(NAMES)
    assert (summary.train, summary.val, summary.test) == (40, 9, 0), "test images without labels are left out"
    assert dataset.train.labels.tolist() == [i % 3 for i in range(40)]
    assert [dataset.train.read(i) for i in (0, 5, 6, 19, 20, 39)] == [png(i) for i in (0, 5, 6, 19, 20, 39)]
    assert dataset.train.name(27).endswith("train-00001-of-00002.parquet:7")
    assert [dataset.val.read(i) for i in range(9)] == [png(i) for i in range(40, 49)]
    assert main(["data", "info", str(hub)]) == 0


def test_large_files_are_read_in_blocks_of_neighbors_and_never_as_a_whole(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def epoch(fraction: float | None) -> list[tuple[int, int]]:
        loader = ImageLoader.open(
            hub, batch_size=4, image_size=4, augment=False, decoder="pillow", mean=(0, 0, 0), val_fraction=fraction
        )
        return [
            (round(float(image.mean() * 255 * 0.226)), int(label))
            for images, labels in loader
            for image, label in zip(images, labels, strict=True)
        ]

    small = epoch(None)
    monkeypatch.setattr(tables, "CACHE_BYTES", 1)
    images = open_dataset(str(hub)).train
    assert isinstance(images, TableImages) and images.usual_block == 6
    large = epoch(None)
    assert sorted(label for _, label in small) == sorted(label for _, label in large) and small != large
    assert [label for _, label in large] == [value % 3 for value, _ in large], "each image has its own label"
    assert len(images._loaded) <= 1
    assert len(epoch(0.25)) == 28, "30 images are left, and 28 of them fill batches"


@pytest.mark.parametrize("wanted", [None, "fine"])
def test_texts_numbers_and_several_label_columns(tmp_path: Path, wanted: str | None) -> None:
    (tmp_path / "train").mkdir()
    images = pyarrow.array([png(i) for i in range(20)], pyarrow.binary())
    texts, numbers = [f"c{i % 2}" for i in range(20)], [5 * (i % 4) for i in range(20)]
    parquet.write_table(
        pyarrow.table({"picture": images, "coarse": texts, "fine": numbers}), tmp_path / "train/0000.parquet"
    )
    if wanted is None:
        with pytest.raises(InputError, match=r"set data\.label_column to one of coarse, fine"):
            open_dataset(str(tmp_path))
        assert open_dataset(str(tmp_path), label_column="coarse").classes == ("c0", "c1")
        with pytest.raises(InputError, match=r"no column 'picture' of labels.*it has coarse, fine"):
            open_dataset(str(tmp_path), label_column="picture")
        return
    dataset = open_dataset(str(tmp_path), label_column=wanted)
    assert dataset.classes == ("0", "5", "10", "15") and (len(dataset.train), len(dataset.val)) == (16, 4)
    assert dataset.notes and sorted(dataset.val.labels.tolist()) == [0, 1, 2, 3]


def test_a_column_with_one_value_has_no_labels_if_another_one_varies(tmp_path: Path) -> None:
    columns = {"image": [png(i) for i in range(12)], "species": ["cat", "dog"] * 6, "source": ["web"] * 12}
    parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    dataset = open_dataset(str(tmp_path))
    assert dataset.classes == ("cat", "dog")
    assert dataset.notes[0] == f"{tmp_path}: labels are in column species, because source has only one value"
    both = pyarrow.table({**columns, "source": ["disk"] * 12})
    parquet.write_table(both, tmp_path / "train-1.parquet")
    with pytest.raises(InputError, match=r"set data\.label_column to one of species, source"):
        open_dataset(str(tmp_path))  # a value in each file


def test_a_table_whose_image_files_are_all_missing_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    columns = {"file_name": [f"images/{i}.png" for i in range(12)], "label": ["cat", "dog"] * 6}
    parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    told = rf"train.parquet: none of the image files in column file_name exists, first {tmp_path}/images/0.png: "
    with pytest.raises(InputError, match=told):
        open_dataset(str(tmp_path))
    write_files(tmp_path, {"images/11.png": png(11)})
    assert len(open_dataset(str(tmp_path)).train) == 10, "damaged images are counted in the training"


def test_a_table_without_any_path_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    columns = {"file_name": pyarrow.array([None] * 12, pyarrow.string()), "label": ["cat", "dog"] * 6}
    parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    with pytest.raises(InputError, match=r"train.parquet: column file_name has no path in 12 rows: write the images"):
        open_dataset(str(tmp_path))


def test_save_to_disk_s_arrow_files_and_images_beside_the_table(tmp_path: Path) -> None:
    for split, first in (("train", 0), ("test", 30)):
        (tmp_path / split).mkdir()
        rows = table_of(first, 10)
        path = str(tmp_path / split / "data-00000-of-00001.arrow")
        with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, rows.schema) as stream:
            stream.write_table(rows, max_chunksize=4)
    dataset = open_dataset(str(tmp_path))
    assert (len(dataset.train), len(dataset.val)) == (10, 10) and dataset.val.read(7) == png(37)
    (tmp_path / "a.png").write_bytes(png(99))
    cells = [{"bytes": None, "path": path} for path in ("a.png", "../outside.png", None)]
    images = pyarrow.array(cells, pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
    parquet.write_table(table_of(0, 3, image=images), tmp_path / "only.parquet")
    (tmp_path / "alone").mkdir()
    (tmp_path / "only.parquet").rename(tmp_path / "alone/only.parquet")
    (tmp_path / "a.png").rename(tmp_path / "alone/a.png")
    train = detect_source(tmp_path / "alone").splits["train"].load()
    assert train.read(0) == png(99)
    for i, problem in ((1, "the image is a file outside "), (2, "the row has no image")):
        with pytest.raises(OSError, match=problem):
            train.read(i)


def test_files_that_name_the_classes_otherwise_are_refused(hub: Path) -> None:
    """Each file's ClassLabel numbers its own list: 0 is the cat of one, and the dog of the other."""
    other = table_of(40, 9)
    features = {"label": {"_type": "ClassLabel", "names": ["dog", "cat", "owl"]}}
    other = other.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(other, hub / "data/validation-00000-of-00001.parquet")
    told = r"label 0 in column label is 'dog' in .*validation-.*, but 'cat' in .*train-00000.*: write both"
    with pytest.raises(InputError, match=told):
        survey(str(hub))


def test_what_datasets_keeps_beside_its_files_is_not_read_twice(tmp_path: Path) -> None:
    """`datasets.map` writes cache-FINGERPRINT.arrow into the folder of save_to_disk."""
    rows = table_of(0, 12)
    (tmp_path / "train").mkdir()
    for name in ("data-00000-of-00001", "cache-0123456789abcdef", "cache-fedcba9876543210_00001_of_00002"):
        file = str(tmp_path / f"train/{name}.arrow")
        with pyarrow.OSFile(file, "wb") as out, pyarrow.ipc.new_stream(out, rows.schema) as stream:
            stream.write_table(rows)
    found = survey(str(tmp_path), val_fraction=0.25)
    assert (found.train, found.val) == (9, 3)


def test_of_several_columns_of_images_the_usual_one_is_taken_and_said(tmp_path: Path) -> None:
    rows = table_of(0, 6)
    features = {name: {"_type": "Image"} for name in ("mask", "image")} | {
        "label": {"_type": "ClassLabel", "names": NAMES}
    }
    both = pyarrow.table({"mask": table_of(6, 6)["image"], "image": rows["image"], "label": rows["label"]})
    both = both.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    for split in ("train", "validation"):
        parquet.write_table(both, tmp_path / f"{split}.parquet")
    dataset = open_dataset(str(tmp_path))
    assert dataset.train.read(2) == png(2)
    assert dataset.notes == (f"{tmp_path}: using the images in column image, one of mask, image",)


def test_splits_are_known_by_names(tmp_path: Path) -> None:
    for name in ("train-0.parquet", "dev.parquet", "my_test.parquet", "constraint.parquet", "valid/0.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = {split: [path.name for path in paths] for split, paths in table_files(tmp_path).items()}
    assert found == {
        "train": ["train-0.parquet"],
        "val": ["dev.parquet", "0.parquet"],
        "test": ["my_test.parquet"],
        "none": ["constraint.parquet"],
    }


def test_files_of_other_splits_and_absent_parts_are_said(tmp_path: Path) -> None:
    for name in ("train-00000-of-00003", "train-00002-of-00003", "extra-00000-of-00001", "test-00001-of-00001"):
        parquet.write_table(table_of(0, 6), tmp_path / f"{name}.parquet")
    dataset = open_dataset(str(tmp_path))
    assert (len(dataset.train), len(dataset.val)) == (12, 6)
    assert dataset.notes == (
        "1 of 3 files of the train split missing, first train-00001-of-00003: is the download complete?",
        f"{tmp_path}: ignored extra-00000-of-00001.parquet, because the name has no split, unlike the others",
    )


@pytest.mark.parametrize(
    "names",
    [
        ("train-00000-of-00001.parquet", "data/train-00000-of-00001.parquet"),
        ("train-00000-of-00001.parquet", "train-00000-of-00001 (1).parquet"),
        ("train.parquet", "train.arrow"),
        ("train/0000.parquet", "train/0000 - Copy.parquet"),
    ],
)
def test_a_part_that_is_there_twice_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        parquet.write_table(table_of(0, 6), tmp_path / name)
    with pytest.raises(InputError, match=r" are the same shard of the train split: remove one of the two"):
        survey(str(tmp_path))


def test_parts_of_several_folders_and_configurations_are_no_copies(tmp_path: Path) -> None:
    for name in ("train/0000", "training/0000", "a-train-00000-of-00001", "b-train-00000-of-00001", "test/0000"):
        (tmp_path / f"{name}.parquet").parent.mkdir(exist_ok=True)
        parquet.write_table(table_of(0, 6), tmp_path / f"{name}.parquet")
    assert survey(str(tmp_path)).train == 24


@pytest.mark.parametrize(
    "names",
    [
        ("part.0.parquet", "part.1.parquet"),
        ("flowers-v1.0-a.parquet", "flowers-v1.0-b.parquet"),
        ("2012.parquet", "2014.parquet"),
        ("shard (1).parquet", "shard (2).parquet"),
    ],
    ids=["Dask", "a version", "years", "renamed on Windows"],
)
def test_names_that_differ_in_any_part_are_no_copies(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        parquet.write_table(table_of(0, 6), tmp_path / name)
    found = survey(str(tmp_path))
    assert found.train + found.val == 12 and not [note for note in found.notes if "absent" in note]


def test_numbers_that_are_counted_from_1_are_complete(tmp_path: Path) -> None:
    for number in range(3):
        parquet.write_table(table_of(0, 6), tmp_path / f"train-{number:05d}-of-00002.parquet")
    assert not [note for note in survey(str(tmp_path)).notes if "missing" in note]


def test_images_in_base64_are_named(tmp_path: Path) -> None:
    text = "/9j/4AAQSkZJRgABAQ"
    parquet.write_table(pyarrow.table({"image": [text] * 6, "label": [0, 1] * 3}), tmp_path / "train.parquet")
    dataset = open_dataset(str(tmp_path))
    with pytest.raises(OSError, match=f"the image is a text in base64, '{text}"):
        dataset.train.read(0)


def test_damaged_files_and_wrong_labels_are_named(hub: Path) -> None:
    last = hub / "data/validation-00000-of-00001.parquet"
    parquet.write_table(table_of(0, 3, label=pyarrow.array([0, 7, 1])), last)
    told = r"image 1 of the val split in .*validation.* has label 7, which is not a class"
    with pytest.raises(InputError, match=told):
        open_dataset(str(hub))
    last.write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match=r"cannot read .*validation.*; is the download complete"):
        survey(str(hub))
    parquet.write_table(pyarrow.table({"label": [1, 2]}), last)
    with pytest.raises(InputError, match="no column"):
        open_dataset(str(hub))
    parquet.write_table(table_of(0, 9).slice(0, 0), last)
    with pytest.raises(InputError, match=r"validation.* have no image: is the download complete"):
        open_dataset(str(hub))
    parquet.write_table(table_of(0, 9), last)
    last.write_bytes(last.read_bytes().replace(b"label", b"l\xc2bel"))
    with pytest.raises(InputError, match=r"cannot read .*validation.*; is the download complete"):
        open_dataset(str(hub))


def test_a_file_or_a_folder_above_the_files_is_answered_with_the_folder(hub: Path, tmp_path: Path) -> None:
    file = next((hub / "data").glob("*.parquet"))
    with pytest.raises(InputError, match=f"data folder {file} is a file: give the folder that it is in"):
        open_dataset(str(file))
    with pytest.raises(InputError, match="is not a folder: give the folder of the Parquet"):
        TABLES.source(file)
    above = tmp_path / "above"
    for name in ("fine", "coarse"):
        (above / name / "train").mkdir(parents=True)
        shutil.copy(file, above / name / "train/0000.parquet")
    with pytest.raises(InputError, match=f"only in folders below it: give {above}/coarse or {above}/fine"):
        open_dataset(str(above))
    with pytest.raises(InputError, match="only in folders below it"):
        survey(str(above))
    assert len(open_dataset(str(above / "fine")).train) > 0


def test_parquet_becomes_shards(hub: Path, tmp_path: Path) -> None:
    assert main(["prepare", "parquet", str(hub), str(tmp_path / "out")]) == 0
    packed, plain = open_dataset(str(tmp_path / "out")), open_dataset(str(hub))
    assert packed.classes == plain.classes
    for a, b in ((packed.train, plain.train), (packed.val, plain.val)):
        assert sorted(a.read(i) for i in range(len(a))) == sorted(b.read(i) for i in range(len(b)))
