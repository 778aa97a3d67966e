"""The learning rate of each step."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cputrain.recipe.schema.base import Auto, Positive, Rate, Section, misfit


class ScheduleSection(Section):
    """The learning rate of each step: a linear warm-up from start_rate to peak_rate, then a decay."""

    name: Literal["linear", "poly", "poly_from_start", "steps", "cosine", "constant"] = "linear"
    """Decay of the learning rate after the warm-up. linear: a straight line to end_rate; poly: a polynomial of the
    remaining steps (MLPerf); poly_from_start: the same, but counted from step 0 (Intel Caffe); steps: multiplied by
    milestone_factor at each milestone; cosine: half a cosine; constant: no decay."""
    start_rate: Rate = 0.0
    """Learning rate of the first step, where the warm-up starts. It is not scaled with batch or workers, and has no
    effect without a warm-up."""
    peak_rate: Rate | Auto = "auto"
    """Learning rate at the end of the warm-up, before optim.scale_rate_by. auto takes the optimizer's scaling rule: for
    momentum 0.1 x global batch / 256; lars, adagrad, adadelta and adagrad_da have no rule and need a number."""
    auto_rate_factor: Annotated[float, Field(gt=0)] = 1.0
    """Factor by which the learning rate of peak_rate=auto is multiplied. Setting peak_rate to a number on the command
    line resets it to 1."""
    reference_batch: Positive | None = None
    """Global batch, in images, for which a numeric peak_rate was tuned. A job with another global batch prints a
    warning, or scales the rate (optim.scale_rate_by=batch). Setting peak_rate on the command line resets it to null:
    unknown."""
    end_rate: Rate = 0.0
    """Learning rate after the last step. For linear, poly, poly_from_start and cosine."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 5.0
    """Length of the warm-up in epochs, fractions included. 0 starts at the peak rate; it cannot exceed epochs."""
    power: Annotated[float, Field(gt=0)] = 2.0
    """Power of the polynomial decay. For poly and poly_from_start; 1 is a straight line."""
    milestones: tuple[Annotated[float, Field(gt=0)], ...] = (30.0, 60.0, 80.0)
    """Epochs after which the learning rate is multiplied by milestone_factor. For steps; later ones than the last epoch
    have no effect."""
    milestone_factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor by which the learning rate is multiplied at each milestone. For steps."""

    @model_validator(mode="after")
    def _rate_options_fit(self) -> "ScheduleSection":
        if self.peak_rate == "auto" and self.reference_batch is not None:
            raise misfit(
                f"schedule.reference_batch={self.reference_batch} needs a numeric schedule.peak_rate, which is auto: "
                "remove it, or set schedule.peak_rate",
                "schedule.reference_batch",
                "schedule.peak_rate",
            )
        if self.peak_rate != "auto" and self.auto_rate_factor != 1.0:
            raise misfit(
                f"schedule.auto_rate_factor={self.auto_rate_factor:g} applies to schedule.peak_rate=auto only, which "
                f"is {self.peak_rate:g}: remove it",
                "schedule.auto_rate_factor",
                "schedule.peak_rate",
            )
        return self
