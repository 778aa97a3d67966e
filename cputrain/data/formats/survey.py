"""Counting the classes and images of a data folder without torch: enough to plan a training, or to refuse it."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.data.formats.folder import read_folder
from cputrain.data.formats.places import (
    ALREADY_PREPARED,
    BOTH_SPLITS,
    FOLDER,
    PREPARED,
    TEST,
    TRAIN,
    VAL,
    VAL_FRACTION,
    counts_to_draw,
    data_root,
    describe_drawn,
    kind_of,
    order_notes,
    read_manifest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Classes and number of images of a data folder, or of generated data; `test` is 0 without such a split.

    `kind` is the recipe's data.kind, `notes` are lines that the user should see.
    """

    classes: tuple[str, ...]
    train: int
    val: int
    test: int = 0
    kind: str = "images"
    notes: tuple[str, ...] = ()

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
    """Count a prepared folder, an image folder, tables or shards of others, as `open_dataset` opens them.

    Raises InputError that names what is missing or wrong.
    """
    root = data_root(path)
    kind = kind_of(root)
    if kind == PREPARED:
        if val_fraction is not None:
            raise InputError(f"{root}{ALREADY_PREPARED}")
        manifest = read_manifest(root)
        counts = {split: entry["images"] for split, entry in manifest["splits"].items()}
        return _survey(tuple(manifest["classes"]), counts)
    if kind == FOLDER:
        return _survey_folder(root, val_fraction)
    from cputrain.data.formats.open import open_dataset  # numpy: needed only where records must be read

    dataset = open_dataset(path, val_fraction=val_fraction, label_column=label_column)
    counts = {split: len(images) for split, images in dataset.splits.items()}
    return _with_counts(dataset.classes, counts, dataset.notes)


def _survey_folder(root: Path, val_fraction: float | None) -> Survey:
    """Count an image folder; what is drawn for validation is known from the sizes of the classes."""
    found = read_folder(root)
    counts = {split: len(listing.labels) for split, listing in found.splits.items()}
    if val_fraction is None and VAL in counts:
        return _survey(found.classes, counts, found.notes)
    if TEST in counts:
        raise InputError(f"{root}{BOTH_SPLITS}")
    share = VAL_FRACTION if val_fraction is None else val_fraction
    sizes = Counter(found.splits[TRAIN].labels)
    by_class = counts_to_draw(found.classes, [sizes[label] for label in range(len(found.classes))], {VAL: share})
    drawn = sum(by_class[VAL])
    after = {TRAIN: counts[TRAIN] - drawn, VAL: drawn}
    if VAL in counts:
        return _survey(found.classes, {**after, TEST: counts[VAL]}, found.notes)
    survey = _survey(found.classes, after, found.notes)
    return replace(survey, notes=(*survey.notes, describe_drawn(str(root), drawn, share)))


def _survey(classes: tuple[str, ...], counts: dict[str, int], notes: tuple[str, ...] = ()) -> Survey:
    return _with_counts(classes, counts, (*notes, *order_notes(classes)))


def _with_counts(classes: tuple[str, ...], counts: dict[str, int], notes: tuple[str, ...]) -> Survey:
    return Survey(classes=classes, train=counts[TRAIN], val=counts[VAL], test=counts.get(TEST, 0), notes=notes)
