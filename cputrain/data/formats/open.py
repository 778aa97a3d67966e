"""Opening a data folder, whichever format it has."""

from collections.abc import Callable
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.data.formats.dataset import Dataset, ImageFiles, OwnSplits
from cputrain.data.formats.folder import read_folder
from cputrain.data.formats.places import (
    ALREADY_PREPARED,
    FOLDER,
    PREPARED,
    RECORDS,
    SPLIT_SEED,
    TABLES,
    TARS,
    data_root,
    kind_of,
    read_manifest,
)
from cputrain.data.formats.shards import Shards
from cputrain.data.formats.subset import with_validation
from cputrain.data.formats.tables import open_tables
from cputrain.data.formats.tfrecord import open_tfrecords
from cputrain.data.formats.webdataset import open_webdataset


def open_dataset(path: str | None, *, val_fraction: float | None = None, label_column: str | None = None) -> Dataset:
    """Open a prepared folder, an image folder, Parquet files, TFRecords or the tar files of webdataset.

    `val_fraction` is the share of the training images that is drawn for validation, the same in every run; None: the
    data's own validation images, or a share of VAL_FRACTION where there are none. `label_column` names the column of
    Parquet files with the labels. Raises InputError that names what is missing or wrong.
    """
    root = data_root(path)
    kind = kind_of(root)
    if kind == PREPARED and val_fraction is not None:
        raise InputError(f"{root}{ALREADY_PREPARED}")
    own = open_tables(root, label_column) if kind == TABLES else READERS[kind](root)
    return with_validation(str(root), own, val_fraction, seed=SPLIT_SEED)


def _prepared_splits(root: Path) -> OwnSplits:
    manifest = read_manifest(root)
    splits = {split: Shards(root, split) for split in manifest["splits"]}
    return OwnSplits(classes=tuple(manifest["classes"]), notes=(), **splits)


def folder_splits(root: Path) -> OwnSplits:
    """The splits of an image folder, as `read_folder` finds them. Raises InputError."""
    found = read_folder(root)
    splits = {split: ImageFiles(listing.paths, listing.labels) for split, listing in found.splits.items()}
    return OwnSplits(classes=found.classes, notes=found.notes, **splits)


READERS: dict[str, Callable[[Path], OwnSplits]] = {
    PREPARED: _prepared_splits,
    RECORDS: open_tfrecords,
    TARS: open_webdataset,
    FOLDER: folder_splits,
}
