"""ImageNet (ILSVRC2012) from its archives, a tar of tars, without unpacking them."""

import re
from pathlib import Path

from affinity.errors import InputError
from cputrain.data.formats.dataset import ArchiveMembers, Dataset, Images
from cputrain.data.formats.flat_labels import check_classes, flat_labels
from cputrain.data.formats.tar import members

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
