"""What a data folder is: its splits, their format, and parts of a split."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from cputrain.affinity.errors import InputError
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


def visible(folder: Path) -> list[Path]:
    """What is in a folder, sorted, without hidden names; [] where it is no folder. Raises InputError."""
    try:
        return sorted(path for path in folder.iterdir() if not is_hidden(path.name)) if folder.is_dir() else []
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}") from None
