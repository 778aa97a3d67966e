"""A data folder before it is opened: the names of its files and splits, its manifest, its classes and images.

Neither torch nor numpy is needed to count. Counting and opening are one code: what a count says is what `open` has.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import counted
from cputrain.files import check_fetched, write_text

if TYPE_CHECKING:  # numpy: not needed to count
    from cputrain.data.formats.dataset import Dataset, Images

VERSION = 3
MANIFEST = "manifest.json"
MOST_BYTES = 256 << 20  # the names of a million damaged images
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 48)]


class _Mixing(BaseModel):
    classes_in_32: float
    at_random: float


class _Split(BaseModel):
    images: Count
    shards: Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
    bytes: list[Count]
    mixing: _Mixing
    unusual: dict[str, Count]
    damaged: list[str]

    @model_validator(mode="after")
    def _has_each_size(self) -> "_Split":
        if len(self.bytes) != self.shards:
            raise ValueError(f"{self.shards} shards, but {len(self.bytes)} sizes")
        return self


class _Manifest(BaseModel):
    version: Literal[3]
    classes: Annotated[list[str], Field(min_length=1)]
    options: dict[str, str | int | float | None]
    splits: dict[Literal["train", "val", "test"], _Split]

    @model_validator(mode="after")
    def _has_training_images(self) -> "_Manifest":
        if "train" not in self.splits:
            raise ValueError("splits has no train")
        return self


def read_manifest(folder: Path) -> dict[str, Any]:
    """{"version", "classes", "options", "splits": {split: {"images", "shards", "bytes", ...}}}.

    `options` are those of `cputrain prepare`, `bytes` each shard's size, `mixing` the classes among 32 in a row,
    `unusual` how many images have each unusual property, `damaged` the images that could not be packed.
    Raises InputError on any other file.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path} has {path.stat().st_size:,} bytes, more than {MOST_BYTES:,}: prepare again")
        check_fetched(path)
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: {str(error)[:200]}: prepare again") from None
    if isinstance(manifest, dict) and manifest.get("version") != VERSION:
        found = str(manifest.get("version"))[:60]
        raise InputError(f"{path} has version {found}; this program reads {VERSION}: prepare again")
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part)[:60] for part in first["loc"])
        raise InputError(f"{path} is damaged: {place or 'it'}: {first['msg']}: prepare again") from None
    return manifest


def write_manifest(
    folder: Path, classes: tuple[str, ...], options: dict[str, Any], splits: dict[str, dict[str, Any]]
) -> None:
    """Write the manifest of a folder whose shards and indices are complete."""
    manifest = {"version": VERSION, "classes": list(classes), "options": options, "splits": splits}
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1))


# Of the formats that Pillow decodes without another program. Not EPS and PostScript (Ghostscript), WMF and EMF
# (Windows), MPEG (its size alone), BUFR, GRIB and HDF5 (nothing without a handler), nor FITS, whose numbers have no
# white.
IMAGE_SUFFIXES = frozenset(
    (
        *(".apng", ".avif", ".avifs", ".blp", ".bmp", ".bw", ".cur", ".dcx", ".dds", ".dib", ".flc", ".fli", ".ftc"),
        *(".ftu", ".gbr", ".gif", ".icb", ".icns", ".ico", ".im", ".j2c", ".j2k", ".jfif", ".jp2", ".jpc", ".jpe"),
        *(".jpeg", ".jpf", ".jpg", ".jpx", ".mpo", ".msp", ".pbm", ".pcd", ".pcx", ".pfm", ".pgm", ".png", ".pnm"),
        *(".ppm", ".psd", ".pxr", ".qoi", ".ras", ".rgb", ".rgba", ".sgi", ".tga", ".tif", ".tiff", ".vda", ".vst"),
        *(".webp", ".xbm", ".xpm"),
    )
)
# What systems put beside a user's files: Windows' and macOS's caches, those of Synology's and QNAP's file servers, a
# file system's own.
NOT_OF_USER = frozenset(
    (
        *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),
        *("icon\r", "__macosx", "network trash folder", "temporary items"),
        *("@eadir", "@tmp", "#recycle", "#snapshot", "@recycle", "@recently-snapshot", "lost+found"),
        *("found.000", "__pycache__"),
    )
)
ORIGIN = "Zone.Identifier"  # ends the name of what Windows notes of a download, which is a file of its own in Linux
SYNSET = re.compile(r"n\d{8}")  # the name of a class of ImageNet
TRAIN, VAL, TEST = SPLITS = ("train", "val", "test")
NO_SPLIT = "none"
# The names of splits that the Hugging Face Hub understands.
NAMES = {
    TRAIN: ("train", "training"),
    VAL: ("validation", "valid", "val", "dev"),
    TEST: ("test", "testing", "eval", "evaluation"),
}
SPLIT_OF = {name: split for split, names in NAMES.items() for name in names}


def is_hidden(name: str) -> bool:
    """Whether a file or folder of that name is not the user's own: .DS_Store, ._photo.jpg, Thumbs.db, __MACOSX."""
    return name.startswith(".") or name.endswith(ORIGIN) or name.lower() in NOT_OF_USER


def is_image(name: str) -> bool:
    """Whether a file of that name is an image that Pillow decodes; a hidden one is none."""
    return suffix_of(name) in IMAGE_SUFFIXES and name[0] != "."  # no name in NOT_OF_USER has such a suffix


def suffix_of(name: str) -> str:
    """The suffix of a file's name in small letters, with its dot; "" for none. (Path.suffix takes three times as long,
    and there may be a million files.)"""
    _, dot, last = name.rpartition(".")
    return f".{last.lower()}" if dot else ""


CONVERT = "convert its images to files in folders of their classes, or to Parquet, TFRecords or tar files"
# Files and folders that are not read, by the ends of their names, and what to do with them.
FOREIGN = {
    re.compile(rf"({names})(-\d+-of-\d+)?$", re.IGNORECASE): cure
    for names, cure in {
        r"\.(zip|7z|rar)": "unpack the archive, and name the folder that has the folders of the classes",
        r"\.(tar|tgz)": "unpack the archive, and name the folder that has the folders of the classes; tar files whose "
        "samples are KEY.jpg and KEY.cls are read as they are: name the folder that they are in",
        r"\.(array_?records?|riegeli)": "convert it with tfds convert_format --dataset_version_dir=DIR "
        "--out_file_format=tfrecord --out_dir=OUT, or its images to files",
        r"[._]lmdb(-lock)?|\.mdb": "it is an LMDB, whose records are as the program that wrote it made them (Caffe's "
        "Datum, a pickle, an image): write their images with the Python package lmdb and that program as files in "
        "folders of their classes, or as Parquet, TFRecords or tar files",
        r"\.mds(\.\w+)?|(^|/)chunk-\d+-\d+(\.\w+)?\.bin": "it is of MosaicML's streaming or of LitData: with that "
        f"package, {CONVERT}",
        r"\.(rec|h5|hdf5|npz|npy|mat|pkl|pickle|beton)|train_data_batch_\d+": CONVERT,
    }.items()
}


def cure_of(name: str) -> str | None:
    """What to do with a file of that name, whose format is not read; None where it is not known."""
    whole = re.sub(r"\.tar\.\w+$", ".tar", name, flags=re.IGNORECASE)  # compressed, in any way
    return next((cure for pattern, cure in FOREIGN.items() if pattern.search(whole)), None)


def read_lines(path: Path) -> list[str]:
    """The lines of a list of names, which other systems may have written. Raises InputError."""
    check_fetched(path)
    return path.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines()


def files_by_split(root: Path, is_wanted: Callable[[str], bool]) -> dict[str, list[Path]]:
    """The wanted files of each split, in the order of their names: those in the folder itself, in data/, or in a folder
    that has a split's name.

    No others are looked for, as an image folder may have a million files. The words in a name tell the split; files
    without any of them are the training split, or NO_SPLIT where others have its name (extra-00000-of-00002.parquet).
    """
    found: dict[str, list[Path]] = {}
    for path in visible_in_splits(root):
        if is_wanted(path.name) and path.is_file():
            found.setdefault(split_of(path.relative_to(root).parts), []).append(path)
    if NO_SPLIT in found and TRAIN not in found:
        found[TRAIN] = found.pop(NO_SPLIT)
    return found


def visible_in_splits(root: Path) -> list[Path]:
    """What is in a folder, in its data/ and in those that have a split's name, sorted, without hidden names."""
    folders = [root, *(path for path in visible(root) if path.name.lower() in ("data", *SPLIT_OF))]
    return sorted(path for folder in folders for path in visible(folder))


def split_of(parts: Sequence[str]) -> str:
    """The split that the words of a path name, or NO_SPLIT; the last one counts, as data sets have names themselves."""
    words = [word for part in parts for word in re.split(r"[^a-z0-9]+", part.lower())]
    return next((SPLIT_OF[word] for word in reversed(words) if word in SPLIT_OF), NO_SPLIT)


def visible(folder: Path) -> list[Path]:
    """What is in a folder, sorted, without hidden names; [] where it is no folder. Raises InputError."""
    try:
        return sorted(path for path in folder.iterdir() if not is_hidden(path.name)) if folder.is_dir() else []
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}") from None


UNLABELED = -1  # as the test splits of others have it
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
class Rows:
    """What the files of a split have: the label of each row, None where it has none, and the first file, for messages.

    `images` makes images of the rows with these numbers, which are of these classes.
    """

    labels: Sequence[Any]
    where: Path
    images: Callable[[list[int], list[int]], "Images"]


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


def labeled_source(
    root: Path, found: Mapping[str, Rows], classes: Mapping[Any, str], *, labels_are_in: str, notes: Sequence[str] = ()
) -> Source:
    """The images of the rows that have a label, in files below `root`; notes count the others.

    `classes` names the classes by their labels, in the order of their numbers. Raises InputError where a split has no
    rows, the training images have no label, or one of the others is none of theirs.
    """
    numbers = {label: number for number, label in enumerate(classes)}
    splits, all_notes = {}, list(notes)
    for each in found.values():
        if not each.labels:
            raise InputError(f"{each.where} has no image, nor have others of its split: is the download complete?")
    if all(label is None for label in found[TRAIN].labels):
        raise InputError(f"{found[TRAIN].where}: no image of the training split has a label in {labels_are_in}")
    for split, each in found.items():
        labeled = [row for row, label in enumerate(each.labels) if label is not None]
        wrong = next((row for row in labeled if each.labels[row] not in numbers), None)
        if wrong is not None:
            raise InputError(
                f"{each.where}: image {wrong:,} of the split {split} has the label {each.labels[wrong]!r}, which is "
                "not a class of the training files"
            )
        if without := len(each.labels) - len(labeled):
            all_notes.append(f"{root}: {counted(without, 'image')} of the split {split} without a label: not used")
        if labeled:
            splits[split] = opened(each.images(labeled, [numbers[each.labels[row]] for row in labeled]))
    return Source(place=str(root), classes=tuple(classes.values()), splits=splits, notes=tuple(all_notes))


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
