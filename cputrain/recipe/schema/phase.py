"""What changes as a training goes on: image sizes that grow, a last stretch with plain images."""

from typing import Annotated, Literal

from pydantic import Field

from cputrain.recipe.schema.base import NotNegative, Positive, Rate, Section


class PhaseSection(Section):
    """From an epoch on, other values than the recipe's; those of the phase before stay where a phase has none."""

    from_epoch: NotNegative
    """The first epoch of the phase, counted from 0."""
    crop: Positive | None = None
    """data.crop in training; evaluation keeps the recipe's."""
    part: Literal["scale_aspect", "plain"] | None = None
    """data.part."""
    weight_decay: Rate | None = None
    """optim.weight_decay."""
    rate: Rate | None = None
    """The learning rate begins here anew and goes to 0 at the training's last step by `power`: with part=plain near
    the end, SURFsara's "collapse"."""
    power: Annotated[float, Field(gt=0)] = 2.0
    """Of rate."""
