"""Raw data sets that prepare reads: ImageNet's tars, MNIST's idx files, Caltech-256, tables, folders."""

import gzip
import io
import math
import re
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cputrain.affinity.errors import InputError
from cputrain.affinity.terminal import text_of
from cputrain.affinity.wording import counted
from cputrain.data.formats.dataset import ArchiveMembers, Dataset, ImageFiles, Images, OwnSplits
from cputrain.data.formats.folder import check_classes, class_folders, flat_labels, list_images, notes_of
from cputrain.data.formats.open import folder_splits
from cputrain.data.formats.places import is_image
from cputrain.data.formats.subset import with_validation
from cputrain.data.formats.tables import open_tables
from cputrain.data.formats.tfrecord import open_tfrecords
from cputrain.data.formats.webdataset import members

ARCHIVE = "256_ObjectCategories.tar"


def open_caltech256(source: Path) -> OwnSplits:
    """Classes and images of 001.ak47/001_0001.jpg, ..., without splits. Raises InputError."""
    if (source / ARCHIVE).is_file():
        source = source / ARCHIVE
    if not source.is_file():
        inner = source / Path(ARCHIVE).stem
        folder = inner if inner.is_dir() else source
        if not folder.is_dir():
            raise InputError(f"{folder} does not exist: name a folder with a folder for each class")
        names = tuple(sorted(map(text_of, class_folders(folder).values())))
        listing = list_images(folder, names, every_class=True)
        train = ImageFiles(listing.paths, listing.labels)
        return OwnSplits(classes=names, train=train, notes=tuple(notes_of(folder, listing)))
    found = [row for row in members(source, 0) if is_image(row[0])]
    by_class = [(Path(name).parent.name, name, offset, length) for name, offset, length in sorted(found)]
    classes = tuple(sorted({row[0] for row in by_class}))
    if not by_class:
        raise InputError(f"{source} contains no image: is it {ARCHIVE}?")
    label = {name: number for number, name in enumerate(classes)}
    images = ArchiveMembers(
        source,
        [offset for _, _, offset, _ in by_class],
        [length for _, _, _, length in by_class],
        [label[name] for name, *_ in by_class],
        [name for _, name, _, _ in by_class],
    )
    return OwnSplits(classes=classes, train=images)


FILES = {"train": ("train-images", "train-labels"), "val": ("t10k-images", "t10k-labels")}
UNSIGNED_BYTES = 8
MAX_VALUES = 1 << 32


class ArrayImages:
    """Gray images in an array, (n, height, width) uint8, encoded as PNGs when they are read."""

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[np.uint8], path: Path) -> None:
        self._pixels, self._path = pixels, path
        self._labels = labels.astype(np.int64)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image, shape (n,)."""
        return self._labels

    def __len__(self) -> int:
        return len(self._pixels)

    def read(self, i: int) -> bytes:
        """Image i as a gray PNG."""
        out = io.BytesIO()
        Image.fromarray(self._pixels[i]).save(out, "PNG")
        return out.getvalue()

    def size(self, i: int) -> int:
        """The image's pixels, one byte each."""
        return int(self._pixels[i].size)

    def name(self, i: int) -> str:
        """The file and the image's number in it."""
        return f"{self._path}:{i}"


def open_mnist(source: Path) -> OwnSplits:
    """Open a folder with the four files. Raises InputError that names the one that is missing or wrong."""
    splits = {}
    for split, (images, labels) in FILES.items():
        path = _find(source, f"{images}-idx3-ubyte")
        pixels, numbers = read_idx(path, 3), read_idx(_find(source, f"{labels}-idx1-ubyte"), 1)
        if len(pixels) != len(numbers):
            raise InputError(f"{path} has {len(pixels):,} images, but there are {len(numbers):,} labels")
        splits[split] = ArrayImages(pixels, numbers, path)
    count = 1 + max(int(split.labels.max()) for split in splits.values())
    return OwnSplits(classes=tuple(str(number) for number in range(count)), notes=(), **splits)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of an idx file: two zero bytes, type, dimensions, their sizes as big-endian words, the values.

    Raises InputError on any other file.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4 + 4 * dimensions)
            shape = _shape(path, head, dimensions)
            data = file.read(math.prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if len(data) != math.prod(shape):
        found = f"{len(data):,}" if len(data) < math.prod(shape) else "more"
        raise InputError(f"{path} has {found} values, but its header describes {' x '.join(map(str, shape))}")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _shape(path: Path, head: bytes, dimensions: int) -> tuple[int, ...]:
    if head[:4] != struct.pack(">HBB", 0, UNSIGNED_BYTES, dimensions) or len(head) < 4 + 4 * dimensions:
        raise InputError(f"{path} is not an idx file of bytes in {counted(dimensions, 'dimension')}")
    shape = struct.unpack_from(f">{dimensions}I", head, 4)
    if math.prod(shape) > MAX_VALUES:
        raise InputError(f"{path} describes {' x '.join(map(str, shape))} values, more than {MAX_VALUES:,}")
    return shape


def _find(source: Path, name: str) -> Path:
    dotted = name.replace("-idx", ".idx")
    candidates = [source / (stem + suffix) for stem in (name, dotted) for suffix in ("", ".gz")]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise InputError(f"{source} has no {name} (or {name}.gz): name the folder that contains MNIST's four files")
    return found


TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
SYNSET = re.compile(r"n\d{8}")


def open_imagenet(source: Path) -> Dataset:
    """Open a folder that contains both archives and the labels of the validation images.

    The labels are where `flat_labels` finds them. Raises InputError that names what is missing or wrong.
    """
    for name in (TRAIN, VAL):
        if not (source / name).is_file():
            raise InputError(f"{source} has no {name}: name the folder that contains ImageNet's archives")
    classes, train = _training(source / TRAIN)
    return Dataset(classes=classes, train=train, val=_validation(source, classes))


def _training(archive: Path) -> tuple[tuple[str, ...], Images]:
    """Classes and images of the training archive: members n01440764.tar, ..., one for each class."""
    found: list[tuple[str, int, int, str]] = []
    for inner, start, _ in members(archive, 0):
        synset = Path(inner).stem
        if not SYNSET.fullmatch(synset):
            raise InputError(f"{archive}: member {inner!r} is not SYNSET.tar: is it ImageNet's training archive?")
        images = [(synset, offset, length, name) for name, offset, length in members(archive, start)]
        if not images:
            raise InputError(f"{archive}: {inner} contains no image: is the download complete?")
        found += images
    if not found:
        raise InputError(f"{archive} contains no image")
    classes = tuple(sorted({synset for synset, *_ in found}))
    label = {synset: number for number, synset in enumerate(classes)}
    train = ArchiveMembers(
        archive,
        [at for _, at, _, _ in found],
        [size for _, _, size, _ in found],
        [label[synset] for synset, *_ in found],
        [f"{synset}/{name}" for synset, _, _, name in found],
    )
    return classes, train


def _validation(source: Path, classes: tuple[str, ...]) -> Images:
    archive = source / VAL
    found = sorted(members(archive, 0))
    named, origin = flat_labels([source], [Path(name).name for name, _, _ in found], archive)
    check_classes(named, classes, origin, source / TRAIN)
    label = {synset: number for number, synset in enumerate(classes)}
    return ArchiveMembers(
        archive,
        [at for _, at, _ in found],
        [size for _, _, size in found],
        [label[synset] for synset in named],
        [name for name, _, _ in found],
    )


VAL_EVERY = 5  # every fifth image of a class is for validation


def write_digits(out: Path) -> None:
    """Write train/DIGIT/*.png and val/DIGIT/*.png, 8-bit gray. Raises InputError when `out` exists."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError(
            "the digits come with scikit-learn, which is not installed: pip install 'cputrain[demo]'"
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


TORCHVISION = "torchvision:"
PARQUET = "parquet"


def open_source(
    kind: str,
    source: Path,
    *,
    val_fraction: float | None,
    test_fraction: float | None = None,
    seed: int,
    label_column: str | None = None,
) -> Dataset:
    """Open a source. Raises InputError that names what is missing or wrong.

    With `val_fraction` validation images are drawn from the training images, and the source's own validation images
    become the test images. Of a source without validation images they are drawn in any case, and test images by
    `test_fraction`. `label_column` names the column of Parquet files with the labels.
    """
    own = _own_splits(kind, source, label_column)
    if own.val is not None and test_fraction is not None:
        raise InputError(f"{source} has images of its own to test on: give --val-fraction alone, which keeps them")
    if own.test is not None and val_fraction is not None:
        raise InputError(f"{source} has validation and test images of its own: remove --val-fraction")
    return with_validation(str(source), own, val_fraction, test_fraction, seed=seed)


def _own_splits(kind: str, source: Path, label_column: str | None) -> OwnSplits | Dataset:
    if kind == PARQUET:
        return open_tables(source, label_column)
    if label_column is not None:
        raise InputError(f"--label-column is for {PARQUET}, not for {kind}: remove it")
    if not kind.startswith(TORCHVISION):
        return KINDS[kind](source)
    from cputrain.data.formats.torchvision_sets import open_torchvision  # torch: only where it is needed

    return open_torchvision(kind.removeprefix(TORCHVISION), source)


def _imagenet(source: Path) -> OwnSplits | Dataset:
    """The two archives, or the image folder that they are usually unpacked to."""
    return open_imagenet(source) if (source / TRAIN).exists() else folder_splits(source)


KINDS: dict[str, Callable[[Path], OwnSplits | Dataset]] = {
    "imagefolder": folder_splits,
    "digits": folder_splits,
    "imagenet": _imagenet,
    "mnist": open_mnist,
    "tfrecord": open_tfrecords,
    "caltech256": open_caltech256,
    PARQUET: open_tables,
}
