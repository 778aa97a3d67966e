"""The data that a recipe names: opened for a training, or only counted, be it read from a folder or generated."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from cputrain.affinity.errors import InputError
from cputrain.data.formats.survey import Survey, survey
from cputrain.recipe.derivation import settings_at
from cputrain.recipe.schema import LINE, OWN_SAMPLES, SYNTHETIC, Recipe

if TYPE_CHECKING:  # numpy: not needed to count
    from cputrain.data.formats.dataset import Dataset
    from cputrain.data.pixels.augment import Transform

SYNTHETIC_CLASSES, SYNTHETIC_IMAGES = 1000, 1_281_167  # ImageNet's
TRAIN_POINTS, VAL_POINTS = 100, 50


def survey_recipe(recipe: Recipe) -> Survey:
    """Count the data of a recipe. Raises InputError that names what is missing or wrong."""
    data = recipe.data
    if data.path == OWN_SAMPLES:
        raise InputError(
            f"data.path={OWN_SAMPLES}: network and samples are those of a script that calls cputrain.train: run it"
        )
    if data.path == SYNTHETIC:
        classes = tuple(map(str, range(recipe.model.classes or SYNTHETIC_CLASSES)))
        return Survey(classes=classes, train=data.train_images or SYNTHETIC_IMAGES, val=0, kind=data.kind)
    if data.path == LINE:
        return Survey(classes=("y",), train=data.train_images or TRAIN_POINTS, val=VAL_POINTS, kind=data.kind)
    if data.path is not None and data.prepare is not None and not Path(data.path).exists():
        command = data.prepare.replace("{path}", shlex.quote(data.path))
        raise InputError(f"data folder {data.path} does not exist: make it with `{command}`, or set data.path=DIR")
    return survey(data.path, val_fraction=data.val_fraction, label_column=data.label_column)


def open_recipe_data(recipe: Recipe) -> "Dataset":
    """Open or generate the data of a recipe. Raises InputError that names what is missing or wrong."""
    from cputrain.data.formats.dataset import Dataset, Points, SyntheticImages
    from cputrain.data.formats.open import open_dataset

    if not recipe.data.generated:
        data = recipe.data
        return open_dataset(data.path, val_fraction=data.val_fraction, label_column=data.label_column)
    counted, seed = survey_recipe(recipe), recipe.seed
    classes, counts = counted.classes, (counted.train, counted.val)
    if recipe.data.path == LINE:
        train_points, val_points = (Points(count, seed, number) for number, count in enumerate(counts))
        return Dataset(classes=classes, train=train_points, val=val_points)
    largest = max([recipe.data.crop, *(phase.crop for phase in recipe.phases if phase.crop)])
    train, val = (SyntheticImages(count, len(classes), largest, seed) for count in counts)
    return Dataset(classes=classes, train=train, val=val)


def training_transform(recipe: Recipe, epoch: int) -> "Transform":
    """The crops and augmentation of the training images in an epoch."""
    from cputrain.data.pixels.augment import Augmentation, Transform

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
