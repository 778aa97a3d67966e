"""Settings that change during a training: image sizes that grow, last epochs with simpler crops."""

from typing import Annotated, Literal

from pydantic import Field

from cputrain.recipe.schema.base import NotNegative, Positive, Rate, Section


class PhaseSection(Section):
    """Values that replace the recipe's from an epoch on. A key left at null keeps the value of the phase before."""

    from_epoch: NotNegative
    """First epoch of the phase, counted from 0. Phases are listed in the order of their epochs."""
    crop: Positive | None = None
    """Side of the training images in pixels, in place of data.crop. Evaluation keeps data.crop; null: no change."""
    train_crop: Literal["random_resized", "random"] | None = None
    """How training images are cropped, in place of data.train_crop; null: no change."""
    weight_decay: Rate | None = None
    """Weight decay, a factor, in place of optim.weight_decay; null: no change."""
    restart_rate: Rate | None = None
    """Learning rate at which the schedule restarts at the phase's first step. From there it decays to 0 at the last
    step of the training, as a polynomial of restart_power; null: the schedule continues."""
    restart_power: Annotated[float, Field(gt=0)] = 2.0
    """Power of the polynomial decay after restart_rate. 1 is a linear decay; without restart_rate it has no effect."""
