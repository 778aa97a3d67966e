"""Image folders without validation images: CLASS/* alone, or train/CLASS/* alone."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cputrain.affinity.errors import InputError
from cputrain.cli import main
from cputrain.data.formats.dataset import Dataset, Images
from cputrain.data.formats.open import open_dataset
from cputrain.data.loader import ImageLoader
from tests.support.images import jpeg, survey, write_files, write_images


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """A folder CLASS/*, of 3 classes with 20 images each."""
    return write_images(tmp_path / "made", train=20).joinpath("train").rename(tmp_path / "photos")


def names(images: Images) -> list[str]:
    return [Path(images.name(i)).parent.name + "/" + Path(images.name(i)).name for i in range(len(images))]


def contents(dataset: Dataset) -> list[list[bytes]]:
    return [sorted(images.read(i) for i in range(len(images))) for images in dataset.splits.values()]


def test_a_folder_of_classes_is_split_alike_wherever_it_is_read(classes: Path, tmp_path: Path) -> None:
    dataset, summary = open_dataset(str(classes)), survey(str(classes))
    assert dataset.classes == summary.classes == ("class0", "class1", "class2")
    assert (len(dataset.train), len(dataset.val)) == (summary.train, summary.val) == (48, 12)
    assert Counter(dataset.val.labels.tolist()) == {0: 4, 1: 4, 2: 4}, "in proportion to the classes"
    assert not set(names(dataset.train)) & set(names(dataset.val))
    assert "12 images drawn" in dataset.notes[0] and dataset.notes == summary.notes
    moved = shutil.copytree(classes, tmp_path / "elsewhere/train")  # files are listed in another order there
    assert names(open_dataset(str(moved.parent)).val) == names(dataset.val), "train/CLASS/* alone is the same"
    loader = ImageLoader.open(classes, split="val", batch_size=12, image_size=8, decoder="pillow")
    assert [labels.tolist() for _, labels in loader] == [[0] * 4 + [1] * 4 + [2] * 4]


def test_a_loader_says_that_it_leaves_images_out_and_reads_all_of_them_if_asked(
    classes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def images_in(**options: Any) -> int:
        loader = ImageLoader.open(classes, batch_size=12, image_size=8, decoder="pillow", **options)
        return sum(len(labels) for _, labels in loader)

    note = (
        f"{classes} has no validation images: using 12 images drawn from its classes in proportion, a fraction of 0.2"
    )
    assert images_in() == 48 and caplog.messages == [note]
    caplog.clear()
    assert images_in(rank=1, world_size=2) == 24 and not caplog.messages, "rank 0 says it"
    assert images_in(val_fraction=0) == 60 and not caplog.messages
    with pytest.raises(InputError, match="has no split 'val': use one of train"):
        images_in(val_fraction=0, split="val")
    with pytest.raises(InputError, match=r"val_fraction=1\.5: it must be at least 0 and less than 1"):
        images_in(val_fraction=1.5)
    with_val = write_images(classes.parent / "both", train=20)
    assert len(open_dataset(str(with_val), val_fraction=0).train) == 60, "its own validation images stay"


def test_prepare_and_a_training_draw_the_same_images(
    classes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for fraction, flags in ((None, []), (0.1, ["--val-fraction", "0.1"])):
        out = tmp_path / f"out-{fraction}"
        assert main(["prepare", "imagefolder", str(classes), str(out), *flags]) == 0
        assert "drawn from its classes" in capsys.readouterr().out
        assert contents(open_dataset(str(out))) == contents(open_dataset(str(classes), val_fraction=fraction))


def test_a_fraction_keeps_a_folder_s_own_validation_images_for_the_test(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", train=20)
    dataset, summary = (read(str(folder), val_fraction=0.25) for read in (open_dataset, survey))
    sizes = [len(images) for images in dataset.splits.values()]
    assert sizes == [summary.train, summary.val, summary.test] == [45, 15, 15] and not dataset.notes
    shutil.copytree(folder / "val", folder / "test")
    for read in (open_dataset, survey):
        with pytest.raises(InputError, match=r"has its own validation and test images: remove data\.val_fraction"):
            read(str(folder), val_fraction=0.25)
    assert main(["prepare", "imagefolder", str(folder), str(tmp_path / "out")]) == 0
    for read in (open_dataset, survey):
        with pytest.raises(InputError, match=r"is prepared: remove data\.val_fraction, or prepare again"):
            read(str(tmp_path / "out"), val_fraction=0.25)


def test_a_class_may_be_called_train_and_one_image_is_too_few(classes: Path) -> None:
    (classes / "class0").rename(classes / "train")
    assert survey(str(classes)).classes == open_dataset(str(classes)).classes == ("class1", "class2", "train")
    for path in sorted((classes / "train").iterdir())[1:]:
        path.unlink()
    for read in (open_dataset, survey):
        with pytest.raises(InputError, match=r"class train has 1 image, too few to split off 0\.2"):
            read(str(classes))


@pytest.mark.parametrize("names", [("train", "test1"), ("train_images", "test_images"), ("train2017",), ("train",)])
def test_splits_without_class_folders_are_not_taken_for_classes(tmp_path: Path, names: tuple[str, ...]) -> None:
    """As Kaggle has them: dogs-vs-cats (train/, test1/), cassava (train_images/, train.csv). The classes are two."""
    write_images(tmp_path / "made", classes=1, train=4, val=0)
    for name in names:
        shutil.copytree(tmp_path / "made/train/class0", tmp_path / "data" / name)
    (tmp_path / "data/labels.csv").write_text("id,breed\n000,boxer\n")
    told = r"splits, not classes: sort the images into class folders, train/CLASS/\*, perhaps by labels\.csv"
    for read in (open_dataset, survey):
        with pytest.raises(InputError, match=told):
            read(str(tmp_path / "data"))


def test_a_training_of_one_class_is_refused_and_a_loader_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an archive unpacked into a folder of its own name has it: train/train/CLASS. The loss of one class is 0."""
    made = write_images(tmp_path / "made", train=4, val=0)
    shutil.copytree(made / "train", tmp_path / "data/train/train")
    assert main(["train", "imagefolder", f"data.path={tmp_path / 'data'}", "--dry-run"]) == 2
    assert capsys.readouterr().err == (
        f"cputrain: {tmp_path / 'data'} has only one class, train, but a classifier needs two or more: name a folder "
        "with one subfolder per class\n"
    )
    assert len(open_dataset(str(tmp_path / "data")).train) == 10, "perhaps without labels: of a loop of one's own"


def test_a_training_of_class_folders_says_where_its_validation_images_are_from(
    classes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"data.path={classes}", "data.crop=32", "plan.ppn=1", "batch.local=8"]
    assert main(["train", "imagefolder", *settings, "data.val_fraction=0.1", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "54 training and 6 validation images" in out
    assert f"{classes} has no validation images: using 6 images drawn" in out


def test_mnist_s_own_files_are_named_with_the_command_that_packs_them(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"")
    for read in (open_dataset, survey):
        with pytest.raises(InputError, match=r"MNIST's original files: pack them with cputrain prepare mnist .* OUT"):
            read(str(tmp_path))


def deep(root: Path, *folders: str) -> Path:
    """A folder with 6 images in each of these folders."""
    return write_files(root, {f"{name}/{i}.jpg": jpeg(i) for name in folders for i in range(6)})


@pytest.mark.parametrize(
    "folders",
    [
        ("cat/images", "dog/images"),
        ("cat/cat", "dog/dog"),
        ("cat/2020", "dog/2021"),
        ("cat", "dog/2020", "dog/2021"),
        ("train/cat/2020", "train/cat/2021", "train/dog/2020", "train/dog/2021"),
    ],
)
def test_subfolders_of_classes_are_read_if_they_cannot_be_the_classes(folders: tuple[str, ...], tmp_path: Path) -> None:
    folder = deep(tmp_path / "photos", *folders)
    dataset = open_dataset(str(folder), val_fraction=0)
    assert dataset.classes == survey(str(folder)).classes == ("cat", "dog")
    named = {dataset.classes[k] in dataset.train.name(i) for i, k in enumerate(dataset.train.labels.tolist())}
    assert named == {True} and len(dataset.train) == 6 * len(folders)


@pytest.mark.parametrize(
    ("folders", "told"),
    [
        (("cat/2020", "cat/2021", "dog/2020", "dog/2021"), "cat/2020, dog/2020, so .* cat, dog or 2020, 2021: for the"),
        (("2020/cat", "2020/dog", "2021/cat"), "2020/cat, 2021/cat, so its classes may be 2020, 2021 or cat, dog: for"),
        (("animals/cat", "animals/dog", "cars/bus"), "may be animals, cars or bus, cat, dog: for the first, move"),
        (("cat/1", "cow/2", "dog/2"), "may be cat, cow, dog or 1, 2: .*; for the second, give one of them, or move"),
        (("a/b/cat", "a/b/dog", "c/b/cat"), "has images in a/b, c/b, so its classes may be a, c or b: for the first"),
        (("photos/train/cat", "photos/train/dog", "docs/figures"), "may be docs, photos or figures, train: .* give"),
        (("photos/train/cat", "more/train/cat"), "has no train/ folder, but more, photos: an image folder has"),
    ],
)
def test_classes_on_either_of_two_levels_are_refused_with_both(
    folders: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=told):
        survey(str(deep(tmp_path / "photos", *folders)))
