"""Sources of `cputrain prepare`: ImageNet's tars, MNIST's idx files, Caltech-256, torchvision's, folders, tables."""

import gzip
import io
import math
import shutil
import struct
import zlib
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cputrain.affinity.errors import InputError
from cputrain.affinity.terminal import text_of
from cputrain.affinity.wording import plural
from cputrain.data.formats.dataset import Dataset, FileParts, Images, LabeledImages
from cputrain.data.formats.folder import (
    check_classes,
    class_folders,
    flat_labels,
    folder_notes,
    list_images,
    read_folder,
)
from cputrain.data.formats.open import RECORDS, TABLES, TARS, read_class_folders
from cputrain.data.formats.records import tar_members
from cputrain.data.formats.source import SYNSET, Source, is_image, open_split

ARCHIVE = "256_ObjectCategories.tar"

FILES = {"train": ("train-images", "train-labels"), "val": ("t10k-images", "t10k-labels")}
UNSIGNED_BYTES = 8
MAX_VALUES = 1 << 32

TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
VAL_EVERY = 5  # every fifth image of a class is for validation
TORCHVISION = "torchvision:"


def read_caltech256(root: Path) -> Source:
    """Read the classes and images of 001.ak47/001_0001.jpg, ..., without splits. Raises InputError."""
    source = root / ARCHIVE if (root / ARCHIVE).is_file() else root
    if not source.is_file():
        inner = source / Path(ARCHIVE).stem
        folder = inner if inner.is_dir() else source
        if not folder.is_dir():
            raise InputError(f"{folder} does not exist: name a folder with one subfolder per class")
        names = tuple(sorted(map(text_of, class_folders(folder).values())))
        listing = list_images(folder, names, every_class=True)
        notes = tuple(folder_notes(folder, listing))
        return Source(place=str(root), classes=names, splits={"train": listing.split}, notes=notes)
    images = sorted(row for row in tar_members(source, 0) if is_image(row[0]))
    if not images:
        raise InputError(f"{source} contains no image: is it {ARCHIVE}?")
    classes = tuple(sorted({Path(name).parent.name for name, _, _ in images}))
    train = _members(source, images, [Path(name).parent.name for name, _, _ in images], classes)
    return Source(place=str(root), classes=classes, splits={"train": open_split(train)})


def _members(
    archive: Path, entries: Sequence[tuple[str, int, int]], class_names: Sequence[str], classes: Sequence[str]
) -> FileParts:
    """Return the images of an archive, from the name, offset and length of each member, and its class."""
    label = {name: number for number, name in enumerate(classes)}
    positions = [(0, offset, length) for _, offset, length in entries]
    return FileParts([archive], positions, [label[name] for name in class_names], [name for name, _, _ in entries])


class ArrayImages(LabeledImages):
    """Gray images in an array, (n, height, width) uint8, encoded as PNGs on reading."""

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[np.uint8], path: Path) -> None:
        self._pixels, self._path = pixels, path
        self._labels = labels.astype(np.int64)

    def read(self, i: int) -> bytes:
        """Return image i as a gray PNG."""
        return _png(Image.fromarray(self._pixels[i]))

    def size(self, i: int) -> int:
        """Return the number of pixels, one byte each."""
        return int(self._pixels[i].size)

    def name(self, i: int) -> str:
        """Return the file and the image's number in it."""
        return f"{self._path}:{i}"


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def read_mnist(source: Path) -> Source:
    """Open a folder with MNIST's four files. Raises InputError if one is missing or invalid."""
    splits = {}
    for split, (images, labels) in FILES.items():
        path = _find(source, f"{images}-idx3-ubyte")
        pixels, numbers = read_idx(path, 3), read_idx(_find(source, f"{labels}-idx1-ubyte"), 1)
        if len(pixels) != len(numbers):
            raise InputError(f"{path} has {plural(len(pixels), 'image')}, but there are {len(numbers):,} labels")
        splits[split] = ArrayImages(pixels, numbers, path)
    count = 1 + max(int(split.labels.max()) for split in splits.values())
    splits_opened = {split: open_split(images) for split, images in splits.items()}
    return Source(place=str(source), classes=tuple(map(str, range(count))), splits=splits_opened)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read the array of an idx file: two zero bytes, type, dimensions, their sizes as big-endian words, the values.

    Raises InputError for any other file.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4 + 4 * dimensions)
            shape = _shape(path, head, dimensions)
            data = file.read(math.prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if len(data) != math.prod(shape):
        size = f"{len(data):,}" if len(data) < math.prod(shape) else "more"
        raise InputError(f"{path} has {size} values, but its header describes {' x '.join(map(str, shape))}")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _shape(path: Path, head: bytes, dimensions: int) -> tuple[int, ...]:
    if head[:4] != struct.pack(">HBB", 0, UNSIGNED_BYTES, dimensions) or len(head) < 4 + 4 * dimensions:
        raise InputError(f"{path} is not an idx file of bytes in {plural(dimensions, 'dimension')}")
    shape = struct.unpack_from(f">{dimensions}I", head, 4)
    if math.prod(shape) > MAX_VALUES:
        raise InputError(f"{path} describes {' x '.join(map(str, shape))} values, more than {MAX_VALUES:,}")
    return shape


def _find(source: Path, name: str) -> Path:
    dotted = name.replace("-idx", ".idx")
    candidates = [source / (stem + suffix) for stem in (name, dotted) for suffix in ("", ".gz")]
    existing = next((path for path in candidates if path.is_file()), None)
    if existing is None:
        raise InputError(f"{source} has no {name} (or {name}.gz): name the folder that contains MNIST's four files")
    return existing


def read_imagenet(source: Path) -> Source:
    """Open a folder with both archives and the labels of the validation images, wherever `flat_labels` finds them; or
    the image folder to which they are usually unpacked.

    Raises InputError if something is missing or invalid.
    """
    if not (source / TRAIN).exists():
        return read_folder(source)
    if not (source / VAL).is_file():
        raise InputError(f"{source} has no {VAL}: name the folder that contains ImageNet's archives")
    classes, train = _training(source / TRAIN)
    entries = sorted(tar_members(source / VAL, 0))
    labels, origin = flat_labels([source], [Path(name).name for name, _, _ in entries], source / VAL)
    check_classes(labels, classes, origin, source / TRAIN)
    val = _members(source / VAL, entries, labels, classes)
    return Source(place=str(source), classes=classes, splits={"train": open_split(train), "val": open_split(val)})


def _training(archive: Path) -> tuple[tuple[str, ...], Images]:
    """Return classes and images of the training archive, which has one member per class: n01440764.tar, ..."""
    entries: list[tuple[str, int, int]] = []
    for inner, start, _ in tar_members(archive, 0):
        synset = Path(inner).stem
        if not SYNSET.fullmatch(synset):
            raise InputError(f"{archive} has member {inner!r}, not SYNSET.tar: is it ImageNet's training archive?")
        images = [(f"{synset}/{name}", offset, length) for name, offset, length in tar_members(archive, start)]
        if not images:
            raise InputError(f"{inner} in {archive} contains no image: is the download complete?")
        entries += images
    if not entries:
        raise InputError(f"{archive} contains no image")
    labels = [name.partition("/")[0] for name, _, _ in entries]
    classes = tuple(sorted(set(labels)))
    return classes, _members(archive, entries, labels, classes)


class TorchvisionImages(LabeledImages):
    """A torchvision data set, whose images are encoded as PNGs on reading."""

    def __init__(self, items: Any, name: str) -> None:
        self._items, self._name = items, name
        targets = next((getattr(items, key) for key in ("targets", "labels", "_labels") if hasattr(items, key)), None)
        labels = [items[i][1] for i in range(len(items))] if targets is None else targets
        self._labels = np.asarray(labels, dtype=np.int64)
        self._typical = len(self.read(0))

    def read(self, i: int) -> bytes:
        """Return image i as a PNG."""
        return _png(self._items[i][0])

    def size(self, i: int) -> int:
        """Return the first image's size as an estimate: sizes are known only after encoding."""
        return self._typical

    def name(self, i: int) -> str:
        """Return the data set and the image's number in it."""
        return f"{self._name}:{i}"


def read_torchvision(name: str, root: Path) -> Source:
    """Open torchvision.datasets.NAME, whose files are in `root` or are downloaded to it.

    Raises InputError if torchvision has no such classification data set, or it cannot be opened.
    """
    from cputrain.models.vision import import_torchvision  # imports torch, which other sources do not need

    datasets = import_torchvision("datasets")
    datasets_known = [key for key in datasets.__all__ if _splits(getattr(datasets, key))]
    if name not in datasets_known:
        near = ", ".join(get_close_matches(name, datasets_known, n=3, cutoff=0.4) or datasets_known[:5])
        raise InputError(f"torchvision has no data set {name!r} with a training split: the nearest names are {near}")
    kind = getattr(datasets, name)
    try:
        train, val = (TorchvisionImages(_open(kind, root, how), f"{name}/{how}") for how in _splits(kind))
    except (RuntimeError, OSError, ValueError) as error:
        raise InputError(f"cannot open torchvision's {name} in {root}: {error}") from None
    classes = getattr(train._items, "classes", None) or range(1 + int(train.labels.max()))
    splits = {"train": open_split(train), "val": open_split(val)}
    return Source(place=str(root), classes=tuple(map(str, classes)), splits=splits)


def _open(kind: Callable[..., Any], root: Path, how: dict[str, Any]) -> Any:
    """Open the data set; download it if torchvision reports that it is missing."""
    try:
        return kind(root, **how)
    except RuntimeError:
        if "download" not in signature(kind).parameters:
            raise
        return kind(root, download=True, **how)


def _splits(kind: Callable[..., Any]) -> list[dict[str, Any]]:
    """Return the arguments that select training and validation images; empty if the data set has none."""
    parameters = signature(kind).parameters
    if "train" in parameters:
        return [{"train": True}, {"train": False}]
    if "split" in parameters and parameters["split"].default == "train":
        return [{"split": "train"}, {"split": "test"}]
    return []


def write_digits(out: Path) -> None:
    """Write train/DIGIT/*.png and val/DIGIT/*.png, 8-bit gray. Raises InputError if `out` exists."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError(
            "the digits are part of scikit-learn, which is not installed: pip install 'cputrain[demo]'"
        ) from None
    if out.exists():
        raise InputError(f"{out} already exists: remove it, or name another folder")
    digits = load_digits()
    partial_out = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial_out, ignore_errors=True)
    seen = [0] * 10
    for i, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "val" if seen[label] % VAL_EVERY == VAL_EVERY - 1 else "train"
        seen[label] += 1
        folder = partial_out / split / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        gray = np.round(pixels * (255 / 16)).astype(np.uint8)
        Image.fromarray(gray).save(folder / f"{i:04d}.png")
    partial_out.rename(out)


def open_source(
    kind: str,
    source: Path,
    *,
    val_fraction: float | None,
    test_fraction: float | None = None,
    seed: int,
    label_column: str | None = None,
) -> Dataset:
    """Open a source. Raises InputError if it is missing or invalid.

    With `val_fraction`, validation images are drawn from the training images, and the source's validation images become
    the test images. If the source has no validation images, they are always drawn, and test images with
    `test_fraction`. `label_column` is the column of Parquet files that has the labels.
    """
    original = _source(kind, source, label_column)
    if "val" in original.splits and test_fraction is not None:
        raise InputError(f"{source} has its own images to test on: give only --val-fraction, which keeps them")
    if "test" in original.splits and val_fraction is not None:
        raise InputError(f"{source} has its own validation and test images: remove --val-fraction")
    return original.open(val_fraction, test_fraction, seed)


def _source(kind: str, source: Path, label_column: str | None) -> Source:
    if kind == TABLES.kind:
        return TABLES.source(source, label_column)
    if label_column is not None:
        raise InputError(f"--label-column is for {TABLES.kind}, not for {kind}: remove it")
    if kind.startswith(TORCHVISION):
        return read_torchvision(kind.removeprefix(TORCHVISION), source)
    return KINDS[kind](source)


KINDS: dict[str, Callable[[Path], Source]] = {
    "imagefolder": read_class_folders,
    "digits": read_folder,
    "imagenet": read_imagenet,
    "mnist": read_mnist,
    RECORDS.kind: RECORDS.source,
    "caltech256": read_caltech256,
    TABLES.kind: TABLES.source,
    TARS.kind: TARS.source,
}
