"""What a data folder holds, counted without torch: enough to plan a training and to refuse a bad one."""

from dataclasses import dataclass
from pathlib import Path

from affinity.errors import InputError
from cputrain.data import folder
from cputrain.data.manifest import MANIFEST, read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Classes and images of a data folder."""

    classes: tuple[str, ...]
    train: int
    val: int


def survey(path: str | None) -> Survey:
    """Count a prepared folder, an image folder or TFRecords. Raises InputError that names what is missing or wrong."""
    root = data_root(path)
    if (root / MANIFEST).is_file():
        manifest = read_manifest(root)
        counts = {split: manifest["splits"][split]["images"] for split in folder.SPLITS}
        return Survey(classes=tuple(manifest["classes"]), **counts)
    if has_tfrecords(root):
        from cputrain.data.tfrecord import open_tfrecords  # numpy: only where records must be read to be counted

        dataset = open_tfrecords(root)
        return Survey(classes=dataset.classes, train=len(dataset.train), val=len(dataset.val))
    classes = folder.class_names(root)
    counts = {
        split: len(folder.list_images(root / split, classes, every_class=split == folder.TRAIN)[0])
        for split in folder.SPLITS
    }
    return Survey(classes=classes, **counts)


def has_tfrecords(root: Path) -> bool:
    """Whether a folder holds ImageNet's TFRecords."""
    return next(root.glob("train-*-of-*"), None) is not None


def data_root(path: str | None) -> Path:
    """The folder that data.path names. Raises InputError when it names none."""
    if path is None:
        raise InputError("the recipe has no data.path: set data.path=DIR to a folder with train/ and val/")
    return Path(path)
