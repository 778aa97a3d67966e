"""What a data folder contains, by the names of its files: images, shards and tables of each split."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from affinity.errors import InputError
from affinity.wording import either
from cputrain.data.formats.manifest import MANIFEST

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
VERSION = re.compile(r"\d+\.\d+\.\d+")  # the folders in which tensorflow_datasets keeps a data set
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
    versions = [path for folder in folders for path in visible(folder) if VERSION.fullmatch(path.name)]
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
