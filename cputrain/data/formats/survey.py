"""Counting the classes and images of a data folder without torch: enough to plan a training, or to refuse it."""

from dataclasses import dataclass
from pathlib import Path

from affinity.errors import InputError
from cputrain.data.formats import folder
from cputrain.data.formats.manifest import MANIFEST, read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Classes and number of images of a data folder, or of generated data; `test` is 0 without such a split.

    `kind` is the recipe's data.kind.
    """

    classes: tuple[str, ...]
    train: int
    val: int
    test: int = 0
    kind: str = "images"

    @property
    def features(self) -> int | None:
        """The length of a row of the network's input where the data is points; None where it is images."""
        return 1 if self.kind == "points" else None

    @property
    def summary(self) -> str:
        """The counts in words, for the first lines of a training."""
        if self.kind == "points":
            return f"{self.train:,} training and {self.val:,} validation points"
        if self.kind == "images":
            counts = [f"{self.train:,} training", f"{self.val:,} validation"]
            splits = f"{', '.join(counts)} and {self.test:,} test" if self.test else " and ".join(counts)
            return f"{splits} images, {len(self.classes):,} classes"
        return f"{self.kind}: {self.train:,} images of random pixels, {len(self.classes):,} classes, no evaluation"


def survey(path: str | None) -> Survey:
    """Count a prepared folder, an image folder or TFRecords. Raises InputError that names what is missing or wrong."""
    root = data_root(path)
    if (root / MANIFEST).is_file():
        manifest = read_manifest(root)
        counts = {split: entry["images"] for split, entry in manifest["splits"].items()}
        return _survey(tuple(manifest["classes"]), counts)
    if has_tfrecords(root):
        from cputrain.data.formats.tfrecord import open_tfrecords  # numpy: needed only where records must be read

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
    """Whether a folder contains TFRecords, by the names of its files."""
    return next(root.glob("train-*-of-*"), None) is not None


def data_root(path: str | None) -> Path:
    """The folder that data.path names. Raises InputError when it names none."""
    if path is None:
        raise InputError("the recipe has no data.path: set data.path=DIR to a folder with train/ and val/")
    return Path(path)
