"""The kinds of sources that `cputrain prepare` takes."""

from collections.abc import Callable
from pathlib import Path

from affinity.errors import InputError
from cputrain.data.formats.caltech256 import open_caltech256
from cputrain.data.formats.dataset import Dataset, OwnSplits
from cputrain.data.formats.idx import open_mnist
from cputrain.data.formats.imagenet import TRAIN, open_imagenet
from cputrain.data.formats.open import folder_splits
from cputrain.data.formats.subset import with_validation
from cputrain.data.formats.tables import open_tables
from cputrain.data.formats.tfrecord import open_tfrecords

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
