"""What a data folder holds, counted without torch: enough to plan a training and to refuse a bad one."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import InputError
from cputrain.data import folder
from cputrain.data.manifest import MANIFEST, read_manifest
from cputrain.recipe.schema import Recipe
from cputrain.recipe.schema.data import LINE, SYNTHETIC

SYNTHETIC_CLASSES, SYNTHETIC_IMAGES = 1000, 1_281_167  # ImageNet's
TRAIN_POINTS, VAL_POINTS = 100, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Classes and images of a data folder, or of data that is generated; `test` is 0 where there is no such split.

    `kind` is the recipe's data.kind.
    """

    classes: tuple[str, ...]
    train: int
    val: int
    test: int = 0
    kind: str = "images"

    @property
    def features(self) -> int | None:
        """Numbers in a row of the network's input where that is points; None where it is images."""
        return 1 if self.kind == "points" else None

    @property
    def told(self) -> str:
        """In words."""
        if self.kind == "points":
            return f"{self.train:,} training and {self.val:,} validation points"
        if self.kind == "images":
            counts = [f"{self.train:,} training", f"{self.val:,} validation"]
            splits = f"{', '.join(counts)} and {self.test:,} test" if self.test else " and ".join(counts)
            return f"{splits} images, {len(self.classes):,} classes"
        return f"{self.kind}: {self.train:,} images of random pixels, {len(self.classes):,} classes, no evaluation"


def survey_recipe(recipe: Recipe) -> Survey:
    """Count what a recipe trains on, be it read or generated. Raises InputError that names what is missing or wrong."""
    data = recipe.data
    if data.path == SYNTHETIC:
        classes = tuple(map(str, range(recipe.model.classes or SYNTHETIC_CLASSES)))
        return Survey(classes=classes, train=data.train_images or SYNTHETIC_IMAGES, val=0, kind=data.kind)
    if data.path == LINE:
        return Survey(classes=("y",), train=data.train_images or TRAIN_POINTS, val=VAL_POINTS, kind=data.kind)
    if data.path is not None and data.prepare is not None and not Path(data.path).exists():
        command = data.prepare.replace("{path}", shlex.quote(data.path))
        raise InputError(f"data folder {data.path} is not there: make it with `{command}`, or set data.path=DIR")
    return survey(data.path)


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
