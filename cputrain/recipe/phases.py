"""The settings of an epoch: the recipe's, as changed by its phases."""

from dataclasses import dataclass
from typing import Literal

from cputrain.recipe.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSettings:
    """Side of the training images in pixels, how they are cropped, and the weight decay."""

    crop: int
    train_crop: Literal["random_resized", "random"]
    weight_decay: float


def settings_at(recipe: Recipe, epoch: int) -> EpochSettings:
    """The settings of an epoch, counted from 0: each from the last phase so far that sets it, else from the recipe."""
    crop, train_crop, weight_decay = recipe.data.crop, recipe.data.train_crop, recipe.optim.weight_decay
    for phase in recipe.phases:
        if phase.from_epoch <= epoch:
            crop = phase.crop or crop
            train_crop = phase.train_crop or train_crop
            weight_decay = weight_decay if phase.weight_decay is None else phase.weight_decay
    return EpochSettings(crop=crop, train_crop=train_crop, weight_decay=weight_decay)
