"""Counting the classes and images of a data folder without torch: enough to plan a training, or to refuse it."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import InputError
from cputrain.data.formats import folder
from cputrain.data.formats.fractions import BOTH_SPLITS, PREPARED, VAL_FRACTION, counts_to_draw, describe_drawn
from cputrain.data.formats.manifest import MANIFEST, read_manifest
from cputrain.data.formats.places import data_root, has_tfrecords
from cputrain.data.formats.table_files import has_tables, tables_below


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Classes and number of images of a data folder, or of generated data; `test` is 0 without such a split.

    `kind` is the recipe's data.kind, `note` a line that the user should see, or "".
    """

    classes: tuple[str, ...]
    train: int
    val: int
    test: int = 0
    kind: str = "images"
    note: str = ""

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


def survey(path: str | None, *, val_fraction: float | None = None, label_column: str | None = None) -> Survey:
    """Count a prepared folder, an image folder, Parquet files or TFRecords, as `open_dataset` opens them.

    Raises InputError that names what is missing or wrong.
    """
    root = data_root(path)
    if (root / MANIFEST).is_file():
        if val_fraction is not None:
            raise InputError(f"{root}{PREPARED}")
        manifest = read_manifest(root)
        counts = {split: entry["images"] for split, entry in manifest["splits"].items()}
        return _survey(tuple(manifest["classes"]), counts)
    if has_tables(root) or has_tfrecords(root) or tables_below(root):
        from cputrain.data.formats.open import open_dataset  # numpy: needed only where records must be read

        dataset = open_dataset(path, val_fraction=val_fraction, label_column=label_column)
        counts = {split: len(images) for split, images in dataset.splits.items()}
        return _survey(dataset.classes, counts, dataset.note)
    return _survey_folder(root, val_fraction)


def _survey_folder(root: Path, val_fraction: float | None) -> Survey:
    """Count an image folder; what is drawn for validation is known from the sizes of the classes."""
    folders = folder.split_folders(root)
    classes = folder.class_names(folders)
    labels = {
        split: folder.list_images(where, classes, every_class=split == folder.TRAIN)[1]
        for split, where in folders.items()
    }
    counts = {split: len(each) for split, each in labels.items()}
    note = folder.other_forms(folders, classes)
    if val_fraction is None and folder.VAL in counts:
        return _survey(classes, counts, note)
    if folder.TEST in counts:
        raise InputError(f"{root}{BOTH_SPLITS}")
    share = VAL_FRACTION if val_fraction is None else val_fraction
    sizes = Counter(labels[folder.TRAIN])
    by_class = counts_to_draw(classes, [sizes[label] for label in range(len(classes))], {folder.VAL: share})
    drawn = sum(by_class[folder.VAL])
    after = {folder.TRAIN: counts[folder.TRAIN] - drawn, folder.VAL: drawn}
    if folder.VAL in counts:
        return _survey(classes, {**after, folder.TEST: counts[folder.VAL]}, note)
    return _survey(classes, after, describe_drawn(str(root), drawn, share))


def _survey(classes: tuple[str, ...], counts: dict[str, int], note: str = "") -> Survey:
    return Survey(classes=classes, train=counts["train"], val=counts["val"], test=counts.get("test", 0), note=note)
