"""What a data folder holds, counted without torch: enough to plan a training and to refuse a bad one."""

from dataclasses import dataclass
from pathlib import Path

from affinity.errors import InputError
from cputrain.data import folder
from cputrain.data.manifest import MANIFEST, read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Classes and images of a data folder; `test` 0 where it has no such split."""

    classes: tuple[str, ...]
    train: int
    val: int
    test: int = 0


def survey(path: str | None) -> Survey:
    """Count a prepared folder, an image folder or TFRecords. Raises InputError that names what is missing or wrong."""
    root = data_root(path)
    if (root / MANIFEST).is_file():
        manifest = read_manifest(root)
        counts = {split: made["images"] for split, made in manifest["splits"].items()}
        return _survey(tuple(manifest["classes"]), counts)
    if has_tfrecords(root):
        from cputrain.data.tfrecord import open_tfrecords  # numpy: only where records must be read to be counted

        dataset = open_tfrecords(root)
        return _survey(dataset.classes, {split: len(images) for split, images in dataset.splits.items()})
    folders = folder.split_folders(root)
    classes = folder.class_names(folders)
    counts = {
        split: len(folder.list_images(where, classes, every_class=split == folder.TRAIN)[0])
        for split, where in folders.items()
    }
    return _survey(classes, counts)


def _survey(classes: tuple[str, ...], counts: dict[str, int]) -> Survey:
    return Survey(classes=classes, train=counts["train"], val=counts["val"], test=counts.get("test", 0))


def has_tfrecords(root: Path) -> bool:
    """Whether a folder holds ImageNet's TFRecords."""
    return next(root.glob("train-*-of-*"), None) is not None


def data_root(path: str | None) -> Path:
    """The folder that data.path names. Raises InputError when it names none."""
    if path is None:
        raise InputError("the recipe has no data.path: set data.path=DIR to a folder with train/ and val/")
    return Path(path)
