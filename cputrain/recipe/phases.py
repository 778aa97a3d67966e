"""What an epoch's training images and penalty are, with the recipe's phases."""

from dataclasses import dataclass
from typing import Literal

from cputrain.recipe.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Side of the training images in pixels, which part of an image they show, and the weight decay."""

    crop: int
    part: Literal["scale_aspect", "plain"]
    weight_decay: float


def now_at(recipe: Recipe, epoch: int) -> Now:
    """The values of an epoch, counted from 0: each from the last phase begun that has it, else the recipe's."""
    crop, part, weight_decay = recipe.data.crop, recipe.data.part, recipe.optim.weight_decay
    for phase in recipe.phases:
        if phase.from_epoch <= epoch:
            crop = phase.crop or crop
            part = phase.part or part
            weight_decay = weight_decay if phase.weight_decay is None else phase.weight_decay
    return Now(crop=crop, part=part, weight_decay=weight_decay)
