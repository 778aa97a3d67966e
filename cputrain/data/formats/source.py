"""Data folders before they are opened: names of files and splits, the manifest, classes and image counts.

Counting needs neither torch nor numpy. Counting and opening share their code, so that their numbers agree.
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
from cputrain.affinity.wording import plural
from cputrain.files import check_downloaded, write_text

if TYPE_CHECKING:  # counting does not need numpy
    from cputrain.data.formats.dataset import Dataset, Images

VERSION = 3
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20  # enough for the names of a million damaged images
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 48)]

# Suffixes of the formats that Pillow decodes without other programs. Not EPS and PostScript (needs Ghostscript), WMF
# and EMF (Windows), MPEG (only its size), BUFR, GRIB and HDF5 (need a handler), and FITS, whose numbers have no known
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
# Files and folders that systems create next to a user's files: caches of Windows and macOS, of Synology's and QNAP's
# file servers, and of file systems.
SYSTEM_FILES = frozenset(
    (
        *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),
        *("icon\r", "__macosx", "network trash folder", "temporary items"),
        *("@eadir", "@tmp", "#recycle", "#snapshot", "@recycle", "@recently-snapshot", "lost+found"),
        *("found.000", "__pycache__"),
    )
)
ORIGIN = "Zone.Identifier"  # suffix of Windows' record of a download, which Linux shows as a separate file
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

CONVERT = "convert its images to files in class folders, or to Parquet, TFRecords or tar files"
# Unsupported files and folders, by the ends of their names, and what to do with them.
FOREIGN = {
    re.compile(rf"({names})(-\d+-of-\d+)?$", re.IGNORECASE): advice
    for names, advice in {
        r"\.(zip|7z|rar)": "unpack the archive, and give the folder that has the class folders",
        r"\.(tar|tgz)": "unpack the archive, and give the folder that has the class folders; tar files whose samples "
        "are KEY.jpg and KEY.cls are read as they are, give the folder that they are in",
        r"\.(array_?records?|riegeli)": "convert it with tfds convert_format --dataset_version_dir=DIR "
        "--out_file_format=tfrecord --out_dir=OUT, or its images to files",
        r"[._]lmdb(-lock)?|\.mdb": "it is an LMDB, whose records depend on the program that wrote it (Caffe's Datum, a "
        f"pickle, an image); with the Python package lmdb and that program, {CONVERT}",
        r"\.mds(\.\w+)?|(^|/)chunk-\d+-\d+(\.\w+)?\.bin": "it is a file of MosaicML's streaming or of LitData; with "
        f"that package, {CONVERT}",
        r"\.(rec|h5|hdf5|npz|npy|mat|pkl|pickle|beton)|train_data_batch_\d+": CONVERT,
    }.items()
}

UNLABELED = -1  # as in test splits of published data sets
VAL_FRACTION = 0.2  # default for a source without validation images
SPLIT_SEED = 1  # of a training, and the default of cputrain prepare, so that both draw the same images
Part = TypeVar("Part")


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


def read_data_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest {"version", "classes", "options", "splits": {split: {"images", "shards", "bytes", ...}}}.

    `options` are the options of `cputrain prepare`, `bytes` each shard's size, `mixing` the classes among 32
    consecutive samples, `unusual` the number of images with each unusual property, `damaged` the images that could not
    be packed. Raises InputError for any other file.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise InputError(
                f"{path} has {path.stat().st_size:,} bytes, more than {MAX_MANIFEST_BYTES:,}: prepare again"
            )
        check_downloaded(path)
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: {str(error)[:200]}; prepare again") from None
    if isinstance(manifest, dict) and manifest.get("version") != VERSION:
        version = str(manifest.get("version"))[:60]
        raise InputError(f"{path} has version {version}, but this program reads {VERSION}: prepare again")
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part)[:60] for part in first["loc"])
        raise InputError(f"{path} is damaged{key and f' at {key}'}: {first['msg']}; prepare again") from None
    return manifest


def write_manifest(
    folder: Path, classes: tuple[str, ...], options: dict[str, Any], splits: dict[str, dict[str, Any]]
) -> None:
    """Write the manifest of a folder whose shards and indices are complete."""
    manifest = {"version": VERSION, "classes": list(classes), "options": options, "splits": splits}
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1))


def is_hidden(name: str) -> bool:
    """Return whether a name is hidden or of a system's file or folder: .DS_Store, ._photo.jpg, Thumbs.db, __MACOSX."""
    return name.startswith(".") or name.endswith(ORIGIN) or name.lower() in SYSTEM_FILES


def is_image(name: str) -> bool:
    """Return whether a file of this name is an image that Pillow decodes; hidden files are not."""
    return suffix_of(name) in IMAGE_SUFFIXES and name[0] != "."  # no name in SYSTEM_FILES has such a suffix


def suffix_of(name: str) -> str:
    """Return the suffix of a file's name in lower case, with its dot, or "". (Path.suffix takes three times as long,
    and there may be a million files.)"""
    _, dot, last = name.rpartition(".")
    return f".{last.lower()}" if dot else ""


def advice_for(name: str) -> str | None:
    """Return what to do with a file of this name if its format is a known unsupported one, else None."""
    whole = re.sub(r"\.tar\.\w+$", ".tar", name, flags=re.IGNORECASE)  # compressed, in any way
    return next((advice for pattern, advice in FOREIGN.items() if pattern.search(whole)), None)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a list of names, which may come from another system. Raises InputError."""
    check_downloaded(path)
    return path.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines()


def files_by_split(root: Path, matches: Callable[[str], bool]) -> dict[str, list[Path]]:
    """Return the files of each split whose names match, sorted by name: those in the folder itself, in data/, or in a
    folder named after a split.

    No other folders are searched, because an image folder may have a million files. The words in a path determine the
    split; files without a split's name are the training split, or NO_SPLIT if other files have the name "train"
    (extra-00000-of-00002.parquet).
    """
    paths: dict[str, list[Path]] = {}
    for path in visible_in_splits(root):
        if matches(path.name) and path.is_file():
            paths.setdefault(split_of(path.relative_to(root).parts), []).append(path)
    if NO_SPLIT in paths and TRAIN not in paths:
        paths[TRAIN] = paths.pop(NO_SPLIT)
    return paths


def visible_in_splits(root: Path) -> list[Path]:
    """Return what is in a folder, in its data/ and in its folders named after a split, sorted, without hidden names."""
    folders = [root, *(path for path in visible_entries(root) if path.name.lower() in ("data", *SPLIT_OF))]
    return sorted(path for folder in folders for path in visible_entries(folder))


def split_of(parts: Sequence[str]) -> str:
    """Return the split named in a path, or NO_SPLIT; the last name counts, as a data set's name may contain one."""
    words = [word for part in parts for word in re.split("[^a-z]+", part.lower())]  # train2017, val00-128.tfrec
    return next((SPLIT_OF[word] for word in reversed(words) if word in SPLIT_OF), NO_SPLIT)


def visible_entries(folder: Path) -> list[Path]:
    """Return what is in a folder, sorted, without hidden names; [] if it is not a folder. Raises InputError."""
    try:
        return sorted(path for path in folder.iterdir() if not is_hidden(path.name)) if folder.is_dir() else []
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}") from None


class UnreadableError(InputError):
    """A file cannot be opened here, so it is unknown whether it has images and labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSummary:
    """Classes and image counts of a data folder or of generated data; `test` is 0 without a test split.

    `kind` is the recipe's data.kind, `notes` are lines to show to the user.
    """

    classes: tuple[str, ...]
    train: int
    val: int
    test: int = 0
    kind: str = "images"
    notes: tuple[str, ...] = ()

    @property
    def features(self) -> int | None:
        """The length of an input row of the network if the data is points; None for images."""
        return 1 if self.kind == "points" else None

    @property
    def summary(self) -> str:
        """The counts as text, for the first lines of a training."""
        if self.kind == "points":
            return f"{self.train:,} training and {self.val:,} validation points"
        if self.kind == "images":
            counts = [f"{self.train:,} training", f"{self.val:,} validation"]
            splits = f"{', '.join(counts)} and {self.test:,} test" if self.test else " and ".join(counts)
            return f"{splits} images, {plural(len(self.classes), 'class')}"
        classes = plural(len(self.classes), "class")
        return f"{self.kind}: {self.train:,} images of random pixels, {classes}, no evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Number of images of a split, and the function that loads them; `labels` if they are known before loading."""

    images: int
    load: Callable[[], "Images"]
    labels: Sequence[int] | None = None


def open_split(images: "Images") -> Split:
    """Return a split of images that are already open."""
    return Split(images=len(images), load=lambda: images)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRows:
    """Rows of the files of a split: the label of each row or None, and the first file, for messages.

    `images` takes numbers of rows and their class numbers, and returns the images of these rows.
    """

    labels: Sequence[Any]
    file: Path
    images: Callable[[list[int], list[int]], "Images"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Classes and splits of a data source; the splits are "train" and perhaps "val" and "test".

    `notes` are lines to show to the user, `kind` is the recipe's data.kind. The splits of a `prepared` source are
    fixed: no validation images can be drawn.
    """

    place: str
    classes: tuple[str, ...]
    splits: Mapping[str, Split]
    notes: tuple[str, ...] = ()
    kind: str = "images"
    prepared: bool = False

    def count(self, val_fraction: float | None = None) -> DatasetSummary:
        """Count the images of each split as `open` would. Raises InputError if they cannot be split in this way."""
        drawn, notes = self._drawn(val_fraction, None)
        counts = {split: part.images for split, part in self.splits.items()}
        if drawn:
            numbers = {split: sum(of_classes) for split, of_classes in drawn.items()}
            counts = self._with_drawn({TRAIN: counts[TRAIN] - sum(numbers.values()), **numbers}, counts)
        train, val, test = (counts.get(split, 0) for split in (TRAIN, VAL, TEST))
        return DatasetSummary(classes=self.classes, train=train, val=val, test=test, kind=self.kind, notes=notes)

    def open(
        self, val_fraction: float | None = None, test_fraction: float | None = None, seed: int = SPLIT_SEED
    ) -> "Dataset":
        """Open the data set, with its own validation images or with images drawn from its training images.

        They are drawn if it has none (a fraction of VAL_FRACTION if `val_fraction` is None), or if `val_fraction` is
        given and not 0; then its own validation images become the test split. Raises InputError if it also has a test
        split.
        """
        from cputrain.data.formats.dataset import Dataset, split_at_random

        drawn, notes = self._drawn(val_fraction, test_fraction)
        images = {split: part.load() for split, part in self.splits.items()}
        if drawn:
            images = self._with_drawn(split_at_random(images[TRAIN], drawn, seed), images)
        return Dataset(classes=self.classes, notes=notes, **images)

    def _with_drawn(self, drawn: dict[str, Part], existing: Mapping[str, Part]) -> dict[str, Part]:
        return {**drawn, TEST: existing[VAL]} if VAL in existing else drawn

    def _drawn(
        self, val_fraction: float | None, test_fraction: float | None
    ) -> tuple[dict[str, list[int]], tuple[str, ...]]:
        """Return how many images of each class to draw for each split, {} for none; and all lines for the user."""
        notes = (*self.notes, *order_notes(self.classes))
        if self.prepared and val_fraction:
            raise InputError(
                f"{self.place} is prepared: remove data.val_fraction, or prepare again with --val-fraction"
            )
        if VAL in self.splits and not val_fraction:
            return {}, notes
        if val_fraction == 0:
            return {VAL: [0 for _ in self.classes]}, notes
        if TEST in self.splits:
            raise InputError(f"{self.place} has its own validation and test images: remove data.val_fraction")
        fraction = VAL_FRACTION if val_fraction is None else val_fraction
        fractions = {VAL: fraction} | ({} if test_fraction is None else {TEST: test_fraction})
        train = self.splits[TRAIN]
        sizes = Counter(train.load().labels.tolist() if train.labels is None else train.labels)
        drawn = counts_to_draw(self.classes, [sizes[label] for label in range(len(self.classes))], fractions)
        if VAL not in self.splits:
            notes += (
                f"{self.place} has no validation images: using {plural(sum(drawn[VAL]), 'image')} drawn from its "
                f"classes in proportion, a fraction of {fraction:g}",
            )
        return drawn, notes


def labeled_source(
    root: Path,
    by_split: Mapping[str, SplitRows],
    classes: Mapping[Any, str],
    *,
    labels_are_in: str,
    notes: Sequence[str] = (),
) -> Source:
    """Return the images of the rows that have a label, in files below `root`; notes count the other rows.

    `classes` maps labels to class names, in the order of the class numbers. Raises InputError if a split has no rows,
    no training image has a label, or another split has a label that the training files lack.
    """
    numbers = {label: number for number, label in enumerate(classes)}
    splits, all_notes = {}, list(notes)
    for rows in by_split.values():
        if not rows.labels:
            raise InputError(f"{rows.file} and the rest of its split have no image: is the download complete?")
    if all(label is None for label in by_split[TRAIN].labels):
        raise InputError(f"no image of the training split in {by_split[TRAIN].file} has a label in {labels_are_in}")
    for split, rows in by_split.items():
        labeled = [row for row, label in enumerate(rows.labels) if label is not None]
        wrong = next((row for row in labeled if rows.labels[row] not in numbers), None)
        if wrong is not None:
            raise InputError(
                f"image {wrong:,} of the {split} split in {rows.file} has label {rows.labels[wrong]!r}, which is not "
                "a class of the training files"
            )
        if without := len(rows.labels) - len(labeled):
            all_notes.append(f"{root}: ignored {plural(without, 'image')} of the {split} split without a label")
        if labeled:
            splits[split] = open_split(rows.images(labeled, [numbers[rows.labels[row]] for row in labeled]))
    return Source(place=str(root), classes=tuple(classes.values()), splits=splits, notes=tuple(all_notes))


def counts_to_draw(
    classes: Sequence[str], sizes: Sequence[int], fractions: Mapping[str, float]
) -> dict[str, list[int]]:
    """Return for each split in `fractions` the number of images to draw from each class; `sizes` are the class sizes.

    Raises InputError if a class would keep no training image.
    """
    drawn = {split: apportioned(fraction, sizes) for split, fraction in fractions.items()}
    for name, size, *counts in zip(classes, sizes, *drawn.values(), strict=True):
        if sum(counts) >= size:
            requested = " and ".join(f"{fraction:g}" for fraction in fractions.values())
            raise InputError(
                f"class {name} has {plural(size, 'image')}, too few to split off {requested} of them for validation: "
                "add images to it, or give a folder that has validation images in val/CLASS/"
            )
    return drawn


def apportioned(fraction: float, sizes: Sequence[int]) -> list[int]:
    """Return the images of each class that make up this fraction of all: largest remainders (Hamilton), at least 1."""
    exact = [fraction * size for size in sizes]
    counts = [max(1, int(size)) for size in exact]
    missing = round(fraction * sum(sizes)) - sum(counts)
    by_remainder = sorted(range(len(sizes)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: max(0, missing)]:
        counts[i] += 1
    return counts


def order_notes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return a line if the classes are numbers whose order as text, which determines the labels, is not numeric."""
    if not all(name.isdecimal() for name in classes):
        return ()
    first = next((label for label, name in enumerate(sorted(classes, key=int)) if name != classes[label]), None)
    if first is None:
        return ()
    return (
        f"the classes are numbers sorted as text, as in torchvision's ImageFolder: label {first} is class "
        f'"{classes[first]}"',
    )
