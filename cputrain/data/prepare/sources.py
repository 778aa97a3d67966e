"""The kinds of sources that `cputrain prepare` takes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from affinity.errors import InputError
from cputrain.data.formats import folder
from cputrain.data.formats.caltech256 import open_caltech256, open_class_folders
from cputrain.data.formats.dataset import Dataset, Images
from cputrain.data.formats.idx import open_mnist
from cputrain.data.formats.imagenet import TRAIN, open_imagenet
from cputrain.data.formats.open import open_folder
from cputrain.data.formats.subset import split_off
from cputrain.data.formats.tfrecord import open_tfrecords

TORCHVISION = "torchvision:"


def open_source(
    kind: str, source: Path, *, val_fraction: float | None, test_fraction: float | None = None, seed: int
) -> Dataset:
    """Open a source. Raises InputError that names what is missing or wrong.

    With `val_fraction` validation images are drawn from the training images, and the source's own validation images
    become the test images. A source without validation images needs `val_fraction`, and gets test images by
    `test_fraction`.
    """
    fractions = {"val": val_fraction, "test": test_fraction}
    drawn = {split: fraction for split, fraction in fractions.items() if fraction is not None}
    if kind in UNSPLIT or (kind == "imagefolder" and drawn and not (source / folder.TRAIN).is_dir()):
        classes, images = UNSPLIT.get(kind, open_class_folders)(source)
        if val_fraction is None:
            raise InputError(f"{kind} has no validation images of its own: split some off with --val-fraction 0.2")
        return split_off(classes, images, drawn, seed)
    dataset = _open_split(kind, source)
    if test_fraction is not None:
        raise InputError(f"{source} has images of its own to test on: give --val-fraction alone, which keeps them")
    if val_fraction is None:
        return dataset
    if dataset.test is not None:
        raise InputError(f"{source} has validation and test images of its own: remove --val-fraction")
    return replace(split_off(dataset.classes, dataset.train, drawn, seed), test=dataset.val)


def _open_split(kind: str, source: Path) -> Dataset:
    if not kind.startswith(TORCHVISION):
        return SPLIT[kind](source)
    from cputrain.data.formats.torchvision_sets import open_torchvision  # torch: only where it is needed

    return open_torchvision(kind.removeprefix(TORCHVISION), source)


def _imagenet(source: Path) -> Dataset:
    """The two archives, or the image folder that they are usually unpacked to."""
    unpacked = (source / "train").is_dir() and not (source / TRAIN).exists()
    return open_folder(source) if unpacked else open_imagenet(source)


SPLIT: dict[str, Callable[[Path], Dataset]] = {
    "imagefolder": open_folder,
    "digits": open_folder,
    "imagenet": _imagenet,
    "mnist": open_mnist,
    "tfrecord": open_tfrecords,
}
UNSPLIT: dict[str, Callable[[Path], tuple[tuple[str, ...], Images]]] = {"caltech256": open_caltech256}
