"""ImageNet (ILSVRC2012) from its archives, a tar of tars, without unpacking them."""

import re
import tarfile
from pathlib import Path

from affinity.errors import InputError
from cputrain.data.formats.dataset import ArchiveMembers, Dataset, Images
from cputrain.data.formats.tar import members

TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
SYNSETS = ("imagenet_2012_validation_synset_labels.txt", "synset_labels.txt", "val_synsets.txt")
SYNSET = re.compile(r"n\d{8}")


def open_imagenet(source: Path) -> Dataset:
    """Open a folder that contains both archives and the labels of the validation images.

    The labels are in the development kit's archive, or in a text file: one synset a line, in the order of the images'
    names, or lines of "FILE SYNSET". Raises InputError that names what is missing or wrong.
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
    named, origin = _synsets(source, [Path(name).name for name, _, _ in found])
    label = {synset: number for number, synset in enumerate(classes)}
    unknown = sorted(set(named) - set(label))
    if unknown:
        raise InputError(f"{origin}: {unknown[0]!r} is not a class of {TRAIN}: do both belong to one data set?")
    return ArchiveMembers(
        archive,
        [at for _, at, _ in found],
        [size for _, _, size in found],
        [label[synset] for synset in named],
        [name for name, _, _ in found],
    )


def _synsets(source: Path, files: list[str]) -> tuple[list[str], Path]:
    """The synset of each validation file, in the order of `files`, and where that was found."""
    text = next((source / name for name in SYNSETS if (source / name).is_file()), None)
    if text is None:
        if not (source / DEVKIT).is_file():
            raise InputError(
                f"{source} has no labels for {VAL}: put {DEVKIT} there, or {SYNSETS[0]} with a synset a line"
            )
        return _devkit(source / DEVKIT, len(files)), source / DEVKIT
    lines = [
        line.split() for line in text.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if line.strip()
    ]
    if all(len(words) == 2 for words in lines):
        by_file = {Path(name).name: synset for name, synset in lines}
        absent = next((name for name in files if name not in by_file), None)
        if absent is not None:
            raise InputError(f"{text} has no line for {absent}")
        return [by_file[name] for name in files], text
    if len(lines) != len(files):
        raise InputError(f"{text} has {len(lines):,} lines, {VAL} {len(files):,} images")
    return [words[0] for words in lines], text


def _devkit(archive: Path, images: int) -> list[str]:
    """The synset of each validation image: the kit's ground truth is a class number, which meta.mat maps to it."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise InputError(
            f"{archive.name} needs scipy: pip install scipy, or put {SYNSETS[0]} beside the archives"
        ) from None
    with tarfile.open(archive) as tar:
        found = {Path(name).name: name for name in tar.getnames()}
        truth, meta = found.get("ILSVRC2012_validation_ground_truth.txt"), found.get("meta.mat")
        if truth is None or meta is None:
            raise InputError(f"{archive} lacks the ground truth or meta.mat: is it the development kit?")
        numbers_file, meta_file = tar.extractfile(truth), tar.extractfile(meta)
        assert numbers_file is not None and meta_file is not None, "tarfile gives None for folders alone"
        numbers = [int(word) for word in numbers_file.read().split()]
        synsets = loadmat(meta_file, squeeze_me=True)["synsets"]
    by_number = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    if len(numbers) != images:
        raise InputError(f"{archive} has {len(numbers):,} labels, {VAL} {images:,} images")
    return [by_number[number] for number in numbers]
