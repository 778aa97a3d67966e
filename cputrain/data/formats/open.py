"""Opening a data folder, whichever format it has."""

from pathlib import Path

from cputrain.data.formats import folder
from cputrain.data.formats.dataset import Dataset, ImageFiles
from cputrain.data.formats.manifest import MANIFEST, read_manifest
from cputrain.data.formats.shards import Shards
from cputrain.data.formats.survey import data_root, has_tfrecords
from cputrain.data.formats.tfrecord import open_tfrecords


def open_dataset(path: str | None) -> Dataset:
    """Open a prepared folder, an image folder or TFRecords. Raises InputError that names what is missing or wrong."""
    root = data_root(path)
    if (root / MANIFEST).is_file():
        manifest = read_manifest(root)
        splits = {split: Shards(root, split) for split in manifest["splits"]}
        return Dataset(classes=tuple(manifest["classes"]), **splits)
    return open_tfrecords(root) if has_tfrecords(root) else open_folder(root)


def open_folder(root: Path) -> Dataset:
    """Open an image folder: train/CLASS/*, val/CLASS/* and perhaps test/CLASS/*. Raises InputError."""
    folders = folder.split_folders(root)
    classes = folder.class_names(folders)
    splits = {
        split: ImageFiles(*folder.list_images(where, classes, every_class=split == folder.TRAIN))
        for split, where in folders.items()
    }
    return Dataset(classes=classes, **splits)
