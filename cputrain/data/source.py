"""What a recipe's data.path holds, and what `cputrain prepare` takes, whichever form it has."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from affinity.errors import InputError
from cputrain.data import folder
from cputrain.data.idx import open_mnist
from cputrain.data.imagenet import TRAIN, members, open_imagenet
from cputrain.data.images import Dataset, Files, Images, Spans, split_off
from cputrain.data.manifest import MANIFEST, read_manifest
from cputrain.data.shards import Shards
from cputrain.data.survey import data_root, has_tfrecords, survey_recipe
from cputrain.data.tfrecord import open_tfrecords
from cputrain.recipe.schema import Recipe
from cputrain.recipe.schema.data import LINE, SYNTHETIC

TORCHVISION = "torchvision:"


def open_data(recipe: Recipe) -> Dataset:
    """What a recipe trains on, be it read or generated. Raises InputError that names what is missing or wrong."""
    if recipe.data.generated:
        from cputrain.data.generated import line, synthetic  # torch: only where it is needed
    if recipe.data.path == SYNTHETIC:
        largest = max([recipe.data.crop, *(phase.crop for phase in recipe.phases if phase.crop)])
        return synthetic(survey_recipe(recipe), largest, recipe.seed)
    if recipe.data.path == LINE:
        return line(survey_recipe(recipe), recipe.seed)
    return open_dataset(recipe.data.path)


def open_dataset(path: str | None) -> Dataset:
    """Open a prepared folder, an image folder or TFRecords. Raises InputError that names what is missing or wrong."""
    root = data_root(path)
    if (root / MANIFEST).is_file():
        manifest = read_manifest(root)
        splits = {split: Shards(root, split) for split in manifest["splits"]}
        return Dataset(classes=tuple(manifest["classes"]), **splits)
    return open_tfrecords(root) if has_tfrecords(root) else open_folder(root)


def open_folder(root: Path) -> Dataset:
    """train/CLASS/*, val/CLASS/* and perhaps test/CLASS/*."""
    folders = folder.split_folders(root)
    classes = folder.class_names(folders)
    splits = {
        split: Files(*folder.list_images(where, classes, every_class=split == folder.TRAIN))
        for split, where in folders.items()
    }
    return Dataset(classes=classes, **splits)


def open_source(
    kind: str, source: Path, *, val_fraction: float | None, test_fraction: float | None = None, seed: int
) -> Dataset:
    """What is to be prepared. Raises InputError that names what is missing or wrong.

    With `val_fraction` the validation images are drawn from those for training, and those that the source has for
    validation become the test images. What has no such images needs it, and gets test images by `test_fraction`.
    """
    fractions = {"val": val_fraction, "test": test_fraction}
    drawn = {split: fraction for split, fraction in fractions.items() if fraction is not None}
    if kind in UNSPLIT or (kind == "imagefolder" and drawn and not (source / folder.TRAIN).is_dir()):
        classes, images = UNSPLIT.get(kind, _classes_in)(source)
        if val_fraction is None:
            raise InputError(f"{kind} has no validation images of its own: split some off with --val-fraction 0.2")
        return split_off(classes, images, drawn, seed)
    dataset = _open_split(kind, source)
    if test_fraction is not None:
        raise InputError(f"{source} has images of its own to test on: give --val-fraction alone, which keeps them")
    if val_fraction is None:
        return dataset
    if dataset.test is not None:
        raise InputError(f"{source} has validation and test images of its own: leave --val-fraction out")
    return replace(split_off(dataset.classes, dataset.train, drawn, seed), test=dataset.val)


def _open_split(kind: str, source: Path) -> Dataset:
    if not kind.startswith(TORCHVISION):
        return SPLIT[kind](source)
    from cputrain.data.torchvision_sets import open_torchvision  # torch: only where it is needed

    return open_torchvision(kind.removeprefix(TORCHVISION), source)


def _imagenet(source: Path) -> Dataset:
    """The archives, or the tree that people unpack them to."""
    unpacked = (source / "train").is_dir() and not (source / TRAIN).exists()
    return open_folder(source) if unpacked else open_imagenet(source)


def _classes_in(source: Path) -> tuple[tuple[str, ...], Images]:
    """CLASS/*, in a folder."""
    if not source.is_dir():
        raise InputError(f"{source} is not there: name a folder with a folder for each class")
    classes = tuple(folder.folders_in(source))
    return classes, Files(*folder.list_images(source, classes, every_class=True))


def _caltech256(source: Path) -> tuple[tuple[str, ...], Images]:
    """256_ObjectCategories.tar, or the folder it unpacks to: 001.ak47/001_0001.jpg, ..."""
    if not source.is_file():
        inner = source / "256_ObjectCategories"
        return _classes_in(inner if inner.is_dir() else source)
    found = [row for row in members(source, 0) if row[0].lower().endswith(folder.SUFFIXES)]
    by_class = [(Path(name).parent.name, name, offset, length) for name, offset, length in sorted(found)]
    classes = tuple(sorted({row[0] for row in by_class}))
    if not by_class:
        raise InputError(f"{source} holds no image: is it 256_ObjectCategories.tar?")
    label = {name: number for number, name in enumerate(classes)}
    images = Spans(
        source,
        [offset for _, _, offset, _ in by_class],
        [length for _, _, _, length in by_class],
        [label[name] for name, *_ in by_class],
        [name for _, name, _, _ in by_class],
    )
    return classes, images


SPLIT: dict[str, Callable[[Path], Dataset]] = {
    "imagefolder": open_folder,
    "digits": open_folder,
    "imagenet": _imagenet,
    "mnist": open_mnist,
    "tfrecord": open_tfrecords,
}
UNSPLIT: dict[str, Callable[[Path], tuple[tuple[str, ...], Images]]] = {"caltech256": _caltech256}
