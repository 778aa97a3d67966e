"""Open or count the data set that the settings name: a data folder, or data generated from a seed."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from cputrain.affinity.errors import InputError
from cputrain.affinity.terminal import text_of
from cputrain.data.formats.open import detect_source
from cputrain.data.formats.source import DatasetSummary, Source, Split
from cputrain.data.settings import LINE, SYNTHETIC, USER_SAMPLES, DataSettings, TrainCrop

if TYPE_CHECKING:  # counting does not need numpy
    from cputrain.data.formats.dataset import Dataset, Images
    from cputrain.data.pixels import Transform

SYNTHETIC_CLASSES, SYNTHETIC_IMAGES = 1000, 1_281_167  # ImageNet's
TRAIN_POINTS, VAL_POINTS = 100, 50


def survey_data(data: DataSettings, *, classes: int | None = None) -> DatasetSummary:
    """Count the images without opening them; generated images have `classes` classes, or else ImageNet's number.

    Raises InputError if the data is missing or invalid.
    """
    return _source(data, classes, data.crop, 0).count(_fraction(data))


def open_data(data: DataSettings, *, classes: int | None = None, side: int | None = None, seed: int = 1) -> "Dataset":
    """Open the data, or generate it from the seed; generated images have `classes` classes, or else ImageNet's number,
    and `side` pixels a side, or else data.crop.

    Raises InputError if the data is missing or invalid.
    """
    return _source(data, classes, side or data.crop, seed).open(_fraction(data))


def _fraction(data: DataSettings) -> float | None:
    return None if data.generated else data.val_fraction


def _source(data: DataSettings, classes: int | None, side: int, seed: int) -> Source:
    if data.path == USER_SAMPLES:
        raise InputError(
            f"data.path={USER_SAMPLES} is for scripts that pass their own network and samples to cputrain.train: run "
            "that script"
        )
    if data.path == SYNTHETIC:
        names = tuple(map(str, range(classes or SYNTHETIC_CLASSES)))
        return _generated(data, names, data.train_images or SYNTHETIC_IMAGES, 0, side, seed)
    if data.path == LINE:
        return _generated(data, ("y",), data.train_images or TRAIN_POINTS, VAL_POINTS, side, seed)
    if data.path is not None and data.prepare is not None and not Path(data.path).exists():
        command = data.prepare.replace("{path}", shlex.quote(data.path))
        raise InputError(f"data folder {data.path} does not exist: make it with `{command}`, or set data.path=DIR")
    found = detect_source(data.path, data.label_column)
    if len(found.classes) == 1:  # the loss would be 0 from the first step on
        raise InputError(
            f"{found.place} has only one class, {text_of(found.classes[0])}, but a classifier needs two or more: name "
            "a folder with one subfolder per class"
        )
    return found


def _generated(data: DataSettings, classes: tuple[str, ...], train: int, val: int, side: int, seed: int) -> Source:
    """Return a source of data generated from a seed: points, or images of side x side pixels."""

    def split(count: int, number: int) -> Split:
        def images() -> "Images":
            from cputrain.data.formats.dataset import Points, SyntheticImages

            if data.path == LINE:
                return Points(count, seed, number)
            return SyntheticImages(count, len(classes), side, seed)

        return Split(images=count, load=images)

    splits = {"train": split(train, 0), "val": split(val, 1)}
    return Source(place=str(data.path), classes=classes, splits=splits, kind=data.kind)


def training_transform(data: DataSettings, crop: int, train_crop: TrainCrop) -> "Transform":
    """Return the crop and augmentation of training images of crop x crop pixels."""
    from cputrain.data.pixels import Transform

    return Transform(
        image_size=crop,
        short_side=round(data.short_side * crop / data.crop),
        crop=train_crop,
        min_area=data.min_crop_area,
        max_aspect=data.max_crop_aspect,
        flip=data.flip,
        augmentation=data.augment,
    )
