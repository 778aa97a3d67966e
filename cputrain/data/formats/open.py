"""Opening a data folder, whichever format it has."""

from pathlib import Path

from affinity.errors import InputError
from affinity.wording import either
from cputrain.data.formats import folder
from cputrain.data.formats.dataset import Dataset, ImageFiles, OwnSplits
from cputrain.data.formats.fractions import PREPARED, SPLIT_SEED
from cputrain.data.formats.manifest import MANIFEST, read_manifest
from cputrain.data.formats.places import data_root, has_tfrecords
from cputrain.data.formats.shards import Shards
from cputrain.data.formats.subset import with_validation
from cputrain.data.formats.table_files import has_tables, tables_below
from cputrain.data.formats.tables import open_tables
from cputrain.data.formats.tfrecord import open_tfrecords


def open_dataset(path: str | None, *, val_fraction: float | None = None, label_column: str | None = None) -> Dataset:
    """Open a prepared folder, an image folder, Parquet files or TFRecords.

    `val_fraction` is the share of the training images that is drawn for validation, the same in every run; None: the
    data's own validation images, or a share of VAL_FRACTION where there are none. `label_column` names the column of
    Parquet files with the labels. Raises InputError that names what is missing or wrong.
    """
    root = data_root(path)
    if (root / MANIFEST).is_file():
        if val_fraction is not None:
            raise InputError(f"{root}{PREPARED}")
        manifest = read_manifest(root)
        splits = {split: Shards(root, split) for split in manifest["splits"]}
        shards = OwnSplits.of(tuple(manifest["classes"]), splits)
        return with_validation(str(root), shards, seed=SPLIT_SEED)
    own: OwnSplits | Dataset
    if has_tables(root):
        own = open_tables(root, label_column)
    elif has_tfrecords(root):
        own = open_tfrecords(root)
    elif below := tables_below(root):
        raise InputError(f"{root} has Parquet or Arrow files only in folders below it: give {either(below)}")
    else:
        own = folder_splits(root)
    return with_validation(str(root), own, val_fraction, seed=SPLIT_SEED)


def folder_splits(root: Path) -> OwnSplits:
    """The splits of an image folder: train/CLASS/* and perhaps val/CLASS/* and test/CLASS/*, or CLASS/* for training.

    Raises InputError that names what is missing or wrong.
    """
    folders = folder.split_folders(root)
    classes = folder.class_names(folders)
    splits = {
        split: ImageFiles(*folder.list_images(where, classes, every_class=split == folder.TRAIN))
        for split, where in folders.items()
    }
    return OwnSplits.of(classes, splits, folder.other_forms(folders, classes))
