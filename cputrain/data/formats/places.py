"""What a data folder is: its splits, their format, and parts of a split."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import counted, either
from cputrain.files import write_text

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
# What systems put beside a user's files: Windows' and macOS's caches, a Synology's thumbnails, a file system's own.
NOT_OF_USER = frozenset(
    (
        *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),
        *("icon\r", "__macosx", "@eadir", "lost+found", "__pycache__"),
    )
)
TRAIN, VAL, TEST = SPLITS = ("train", "val", "test")
# The names of splits that the Hugging Face Hub understands.
NAMES = {
    TRAIN: ("train", "training"),
    VAL: ("validation", "valid", "val", "dev"),
    TEST: ("test", "testing", "eval", "evaluation"),
}
SPLIT_OF = {name: split for split, names in NAMES.items() for name in names}
TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
RECORD_NAME = re.compile(r"-\d+-of-\d+(\.gz)?$|\.tfrec(ord)?s?(\.gz)?$", re.IGNORECASE)
ARCHIVES = {"ILSVRC2012_img_train.tar": "imagenet", "256_ObjectCategories.tar": "caltech256"}
PREPARED, TABLES, RECORDS, TARS, FOLDER = "shards", "Parquet or Arrow files", "TFRecords", "tar files", "image folder"
TFDS_VERSION = re.compile(r"\d+\.\d+\.\d+")  # the folders in which tensorflow_datasets keeps a data set
MOST_FOLDERS = 100  # an image folder may have thousands of classes


def is_hidden(name: str) -> bool:
    """Whether a file or folder of that name is not the user's own: .DS_Store, ._photo.jpg, Thumbs.db, __MACOSX."""
    return name.startswith(".") or name.lower() in NOT_OF_USER


def is_image(name: str) -> bool:
    """Whether a file of that name is an image that Pillow decodes; a hidden one is none."""
    return suffix_of(name) in IMAGE_SUFFIXES and name[0] != "."  # no name in NOT_OF_USER has such a suffix


def suffix_of(name: str) -> str:
    """The suffix of a file's name in small letters, with its dot; "" for none. (Path.suffix takes three times as long,
    and there may be a million files.)"""
    _, dot, last = name.rpartition(".")
    return f".{last.lower()}" if dot else ""


def data_root(path: str | None) -> Path:
    """The folder that data.path names. Raises InputError when it names none."""
    if path is None:
        raise InputError("the recipe has no data.path: set data.path=DIR to a folder of images")
    return Path(path)


def record_files(root: Path) -> dict[str, list[Path]]:
    """The TFRecord files of each split: train-00000-of-01024, imagenet2012-train.tfrecord-00000-of-00001, x.tfrec."""
    return files_by_split(root, lambda name: RECORD_NAME.search(name) is not None)


def table_files(root: Path) -> dict[str, list[Path]]:
    """The Parquet and Arrow files of each split: as on the Hugging Face Hub, or as `save_to_disk` writes them."""
    return files_by_split(root, lambda name: name.lower().endswith(TABLE_SUFFIXES))


def shard_files(root: Path) -> dict[str, list[Path]]:
    """The tar files of each split; none of a folder whose split folders have folders of classes."""
    files = files_by_split(root, lambda name: name.lower().endswith(TAR_SUFFIXES))
    has_classes = any(path.is_dir() for name in SPLIT_OF for path in visible(root / name))
    return {} if has_classes else files


def files_by_split(root: Path, is_wanted: Callable[[str], bool]) -> dict[str, list[Path]]:
    """The wanted files of each split, in the order of their names: those in the folder itself, in data/, or in a folder
    that has a split's name.

    No others are looked for, as an image folder may have a million files. The words in a name tell the split; a file
    without any of them is of the training split.
    """
    found: dict[str, list[Path]] = {}
    folders = [root, *(path for path in visible(root) if path.name.lower() in ("data", *SPLIT_OF))]
    for path in sorted(path for folder in folders for path in visible(folder) if is_wanted(path.name)):
        if path.is_file():
            found.setdefault(split_of(path.relative_to(root).parts), []).append(path)
    return found


def split_of(parts: Sequence[str]) -> str:
    """The split that the words of a path name; the last one counts, as data sets have names themselves."""
    words = [word for part in parts for word in re.split(r"[^a-z0-9]+", part.lower())]
    return next((SPLIT_OF[word] for word in reversed(words) if word in SPLIT_OF), TRAIN)


def folders_below(root: Path, contains: Callable[[Path], object]) -> list[str]:
    """The folders of a folder of which `contains` is true, as the configurations of a data set on the Hub; [] where it
    is an image folder itself."""
    if (root / TRAIN).is_dir():
        return []
    folders = [path for path in visible(root) if path.is_dir()][:MOST_FOLDERS]
    versions = [path for folder in folders for path in visible(folder) if TFDS_VERSION.fullmatch(path.name)]
    return [str(path) for path in (*folders, *versions) if contains(path)]


def visible(folder: Path) -> list[Path]:
    """What is in a folder, sorted, without hidden names; [] where it is no folder. Raises InputError."""
    try:
        return sorted(path for path in folder.iterdir() if not is_hidden(path.name)) if folder.is_dir() else []
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}") from None


FILES_OF = {TABLES: table_files, RECORDS: record_files, TARS: shard_files}


def kind_of(root: Path) -> str:
    """What a data folder has: PREPARED, TABLES, RECORDS, TARS or FOLDER.

    Raises InputError for one that has archives to prepare, or data in folders below it.
    """
    if (root / MANIFEST).is_file():
        return PREPARED
    for archive, kind in ARCHIVES.items():
        if (root / archive).is_file() and not (root / TRAIN).is_dir():
            raise InputError(f"{root} has {archive}: pack it with cputrain prepare {kind} {root} OUT, and name OUT")
    for kind, files in FILES_OF.items():
        if files(root):
            return kind
    for kind, files in FILES_OF.items():
        if below := folders_below(root, files):
            raise InputError(f"{root} has {kind} only in folders below it: give {either(below)}")
    return FOLDER


VAL_FRACTION = 0.2  # of a source without validation images, unless another is requested
SPLIT_SEED = 1  # of a training, and of cputrain prepare unless it gets another: both draw the same images
ALREADY_PREPARED = " is prepared: remove data.val_fraction, or prepare again with --val-fraction"
BOTH_SPLITS = " has validation and test images of its own: remove data.val_fraction"


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


def describe_drawn(source: str, images: int, fraction: float) -> str:
    """A line about validation images that were drawn from a source."""
    return (
        f"{source} has no validation images of its own: {counted(images, 'image')} drawn from its classes in "
        f"proportion, a share of {fraction:g}, are for validation"
    )


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
