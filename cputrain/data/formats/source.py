"""A data set before it is opened: its classes and splits, counted without torch or numpy, or opened.

Counting and opening are one code: what a count says is what `open` then has.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import counted
from cputrain.data.formats.places import TEST, TRAIN, VAL

if TYPE_CHECKING:  # numpy: not needed to count
    from cputrain.data.formats.dataset import Dataset, Images

VAL_FRACTION = 0.2  # of a source without validation images, unless another is requested
SPLIT_SEED = 1  # of a training, and of cputrain prepare unless it gets another: both draw the same images
Part = TypeVar("Part")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A split of so many images, and the function that loads them; `labels` where they are known before that."""

    images: int
    load: Callable[[], "Images"]
    labels: Sequence[int] | None = None


def opened(images: "Images") -> Split:
    """A split whose images are open already."""
    return Split(images=len(images), load=lambda: images)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a place of data has: classes, and the splits "train", perhaps "val" and "test", by name.

    `notes` are lines that the user should see, `kind` is the recipe's data.kind. Of a `prepared` source no validation
    images are drawn.
    """

    place: str
    classes: tuple[str, ...]
    splits: Mapping[str, Split]
    notes: tuple[str, ...] = ()
    kind: str = "images"
    prepared: bool = False

    def count(self, val_fraction: float | None = None) -> Survey:
        """The images of each split, as `open` makes them. Raises InputError where they cannot be split so."""
        drawn, notes = self._drawn(val_fraction, None)
        counts = {split: each.images for split, each in self.splits.items()}
        if drawn:
            numbers = {split: sum(of_classes) for split, of_classes in drawn.items()}
            counts = self._with_drawn({TRAIN: counts[TRAIN] - sum(numbers.values()), **numbers}, counts)
        train, val, test = (counts.get(split, 0) for split in (TRAIN, VAL, TEST))
        return Survey(classes=self.classes, train=train, val=val, test=test, kind=self.kind, notes=notes)

    def open(
        self, val_fraction: float | None = None, test_fraction: float | None = None, seed: int = SPLIT_SEED
    ) -> "Dataset":
        """The data set, with validation images: its own ones, or images drawn from its training images.

        They are drawn where it has none (a share of VAL_FRACTION if `val_fraction` is None), or `val_fraction` is
        given; its own validation images are the test split then. Raises InputError where it has a test split, too.
        """
        from cputrain.data.formats.dataset import Dataset, draw

        drawn, notes = self._drawn(val_fraction, test_fraction)
        images = {split: each.load() for split, each in self.splits.items()}
        if drawn:
            images = self._with_drawn(draw(images[TRAIN], drawn, seed), images)
        return Dataset(classes=self.classes, notes=notes, **images)

    def _with_drawn(self, drawn: dict[str, Part], own: Mapping[str, Part]) -> dict[str, Part]:
        return {**drawn, TEST: own[VAL]} if VAL in own else drawn

    def _drawn(
        self, val_fraction: float | None, test_fraction: float | None
    ) -> tuple[dict[str, list[int]], tuple[str, ...]]:
        """How many images of each class are drawn for each split, {} for none; and all lines for the user."""
        notes = (*self.notes, *order_notes(self.classes))
        if self.prepared and val_fraction is not None:
            raise InputError(
                f"{self.place} is prepared: remove data.val_fraction, or prepare again with --val-fraction"
            )
        if VAL in self.splits and val_fraction is None:
            return {}, notes
        if TEST in self.splits:
            raise InputError(f"{self.place} has validation and test images of its own: remove data.val_fraction")
        share = VAL_FRACTION if val_fraction is None else val_fraction
        fractions = {VAL: share} | ({} if test_fraction is None else {TEST: test_fraction})
        train = self.splits[TRAIN]
        sizes = Counter(train.load().labels.tolist() if train.labels is None else train.labels)
        drawn = counts_to_draw(self.classes, [sizes[label] for label in range(len(self.classes))], fractions)
        if VAL not in self.splits:
            notes += (
                f"{self.place} has no validation images of its own: {counted(sum(drawn[VAL]), 'image')} drawn from its "
                f"classes in proportion, a share of {share:g}, are for validation",
            )
        return drawn, notes


def counts_to_draw(
    classes: Sequence[str], sizes: Sequence[int], fractions: Mapping[str, float]
) -> dict[str, list[int]]:
    """For each split in `fractions`, the images to draw from each class, of which there are `sizes`.

    Raises InputError where a class would keep no image to train on.
    """
    drawn = {split: apportioned(fraction, sizes) for split, fraction in fractions.items()}
    for name, size, *counts in zip(classes, sizes, *drawn.values(), strict=True):
        if sum(counts) >= size:
            requested = " and ".join(f"{fraction:g}" for fraction in fractions.values())
            raise InputError(
                f"class {name} has {counted(size, 'image')}: too few to split off {requested} of them for validation: "
                "add images to it, or name a folder that has validation images of its own in val/CLASS/"
            )
    return drawn


def apportioned(fraction: float, sizes: Sequence[int]) -> list[int]:
    """How many images of each class make that fraction of all: largest remainders (Hamilton), at least 1 each."""
    exact = [fraction * size for size in sizes]
    counts = [max(1, int(share)) for share in exact]
    missing = round(fraction * sum(sizes)) - sum(counts)
    by_remainder = sorted(range(len(sizes)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: max(0, missing)]:
        counts[i] += 1
    return counts


def order_notes(classes: Sequence[str]) -> tuple[str, ...]:
    """A line where the classes are numbers, and their order as texts, which makes the labels, is another one."""
    if not all(name.isdecimal() for name in classes):
        return ()
    first = next((label for label, name in enumerate(sorted(classes, key=int)) if name != classes[label]), None)
    if first is None:
        return ()
    return (
        f"the classes are numbers in the order of texts, as torchvision's ImageFolder has them: label {first} is class "
        f'"{classes[first]}"',
    )
