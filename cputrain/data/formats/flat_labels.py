"""The classes of images that lie in one folder or archive, from a file of labels that comes with them."""

import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from affinity.errors import InputError

DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
SYNSETS = ("imagenet_2012_validation_synset_labels.txt", "synset_labels.txt", "val_synsets.txt")
# Kaggle's ImageNet ("ILSVRC2012_val_00000001,n01751748 85 1 499 272") and Tiny ImageNet's ("val_0.JPEG n03444034 0 0").
FILES = ("LOC_val_solution.csv", "val_annotations.txt", *SYNSETS)
HEADER = "ImageId,"


def has_labels(folders: Sequence[Path]) -> bool:
    """Whether a file of labels is in one of these folders."""
    return any((folder / name).is_file() for folder in folders for name in (*FILES, DEVKIT))


def flat_labels(folders: Sequence[Path], files: Sequence[str], images: Path) -> tuple[list[str], Path]:
    """The class of each of the `files`, which are all in `images` and sorted, and the file that tells it.

    It is the first in these folders: lines that begin with a file's name, with or without its suffix, and its class; or
    one class a line, in the order of `files`; or ImageNet's development kit. Raises InputError where there is none, or
    it does not fit.
    """
    found = [folder / name for name in (*FILES, DEVKIT) for folder in folders if (folder / name).is_file()]
    if not found:
        raise InputError(
            f"{images} has {len(files):,} images and no labels for them: put {FILES[0]}, {DEVKIT} or {SYNSETS[0]} "
            f"beside it, or sort the images into folders of their classes"
        )
    source = found[0]
    if source.name == DEVKIT:
        return _devkit(source, len(files), images), source
    rows = [
        line.replace(",", " ").split()
        for line in source.read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.startswith(HEADER)
    ]
    if all(len(words) > 1 for words in rows):
        by_name = {PurePosixPath(words[0]).stem: words[1] for words in rows}
        absent = next((name for name in files if PurePosixPath(name).stem not in by_name), None)
        if absent is not None:
            raise InputError(f"{source} has no line for {absent} of {images}: is it of another data set?")
        return [by_name[PurePosixPath(name).stem] for name in files], source
    if len(rows) != len(files):
        raise InputError(f"{source} has {len(rows):,} lines, {images} {len(files):,} images")
    return [words[0] for words in rows], source


def check_classes(named: Sequence[str], classes: Sequence[str], source: Path, training: Path) -> None:
    """Raise InputError for a class of the labels in `source` that the training images lack."""
    if unknown := sorted(set(named) - set(classes)):
        raise InputError(f"{source}: {unknown[0]!r} is not a class of {training}: do both belong to one data set?")


def _devkit(archive: Path, count: int, images: Path) -> list[str]:
    """The synset of each validation image: the kit's ground truth is a class number, which meta.mat maps to it."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise InputError(
            f"{archive.name} needs scipy: pip install scipy, or put {SYNSETS[0]} beside the images"
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
    if len(numbers) != count:
        raise InputError(f"{archive} has {len(numbers):,} labels, {images} {count:,} images")
    return [by_number[number] for number in numbers]
