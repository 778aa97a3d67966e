"""Open or count a recipe's data set: a data folder, or data generated from the seed."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from cputrain.affinity.errors import InputError
from cputrain.affinity.terminal import text_of
from cputrain.data.formats.open import detect
from cputrain.data.formats.source import DatasetSummary, Source, Split
from cputrain.recipe.derivation import settings_at
from cputrain.recipe.schema import LINE, SYNTHETIC, USER_SAMPLES, Recipe

if TYPE_CHECKING:  # counting does not need numpy
    from cputrain.data.formats.dataset import Dataset, Images
    from cputrain.data.pixels import Transform

SYNTHETIC_CLASSES, SYNTHETIC_IMAGES = 1000, 1_281_167  # ImageNet's
TRAIN_POINTS, VAL_POINTS = 100, 50


def survey_recipe(recipe: Recipe) -> DatasetSummary:
    """Count a recipe's images without opening them. Raises InputError if the data is missing or invalid."""
    return _source(recipe).count(_fraction(recipe))


def open_recipe_data(recipe: Recipe) -> "Dataset":
    """Open or generate a recipe's data. Raises InputError if it is missing or invalid."""
    return _source(recipe).open(_fraction(recipe))


def _fraction(recipe: Recipe) -> float | None:
    return None if recipe.data.generated else recipe.data.val_fraction


def _source(recipe: Recipe) -> Source:
    data = recipe.data
    if data.path == USER_SAMPLES:
        raise InputError(
            f"data.path={USER_SAMPLES} is for scripts that pass their own network and samples to cputrain.train: run "
            "that script"
        )
    if data.path == SYNTHETIC:
        classes = recipe.model.classes or SYNTHETIC_CLASSES
        return _generated(recipe, tuple(map(str, range(classes))), data.train_images or SYNTHETIC_IMAGES, 0)
    if data.path == LINE:
        return _generated(recipe, ("y",), data.train_images or TRAIN_POINTS, VAL_POINTS)
    if data.path is not None and data.prepare is not None and not Path(data.path).exists():
        command = data.prepare.replace("{path}", shlex.quote(data.path))
        raise InputError(f"data folder {data.path} does not exist: make it with `{command}`, or set data.path=DIR")
    found = detect(data.path, data.label_column)
    if len(found.classes) == 1:  # the loss would be 0 from the first step on
        raise InputError(
            f"{found.place} has only one class, {text_of(found.classes[0])}, but a classifier needs two or more: name "
            "a folder with one subfolder per class"
        )
    return found


def _generated(recipe: Recipe, classes: tuple[str, ...], train: int, val: int) -> Source:
    """Return a source of data generated from the recipe's seed: points, or images as large as the largest crop."""

    def split(count: int, number: int) -> Split:
        def images() -> "Images":
            from cputrain.data.formats.dataset import Points, SyntheticImages

            if recipe.data.path == LINE:
                return Points(count, recipe.seed, number)
            largest = max([recipe.data.crop, *(phase.crop for phase in recipe.phases if phase.crop)])
            return SyntheticImages(count, len(classes), largest, recipe.seed)

        return Split(images=count, load=images)

    splits = {"train": split(train, 0), "val": split(val, 1)}
    return Source(place=str(recipe.data.path), classes=classes, splits=splits, kind=recipe.data.kind)


def training_transform(recipe: Recipe, epoch: int) -> "Transform":
    """Return the crop and augmentation of the training images in an epoch."""
    from cputrain.data.pixels import Augmentation, Transform

    data, now = recipe.data, settings_at(recipe, epoch)
    return Transform(
        image_size=now.crop,
        short_side=round(data.short_side * now.crop / data.crop),
        crop=now.train_crop,
        min_area=data.min_crop_area,
        max_aspect=data.max_crop_aspect,
        flip=data.flip,
        augmentation=Augmentation(**data.augment.model_dump(exclude={"mixup", "cutmix"})),
    )
