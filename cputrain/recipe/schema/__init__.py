"""A training as data: what a recipe may hold. The text under a field is its manual."""

from math import ceil
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from cputrain.recipe.schema.base import Fraction, NotNegative, Positive, Section, misfit
from cputrain.recipe.schema.data import LINE, AugmentSection, DataSection
from cputrain.recipe.schema.model import ModelSection
from cputrain.recipe.schema.optim import OptimSection, ScheduleSection
from cputrain.recipe.schema.phase import PhaseSection
from cputrain.recipe.schema.run import BatchSection, CheckpointSection, CommSection, EvaluateSection, PlanSection
from cputrain.recipe.schema.sweep import SweepSection

__all__ = [
    "AugmentSection",
    "BatchSection",
    "CheckpointSection",
    "CommSection",
    "DataSection",
    "EvaluateSection",
    "ModelSection",
    "OptimSection",
    "PhaseSection",
    "PlanSection",
    "Recipe",
    "ScheduleSection",
    "SweepSection",
]


class Recipe(Section):
    """Everything that decides what a training computes."""

    name: str = "training"
    """What the run is called."""
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    batch: BatchSection = BatchSection()
    optim: OptimSection = OptimSection()
    schedule: ScheduleSection = ScheduleSection()
    phases: tuple[PhaseSection, ...] = ()
    """What is otherwise from an epoch on, in their order."""
    epochs: Positive = 90
    """Passes over the training images."""
    max_steps: Positive | None = None
    """Stop after this many steps, for trials; the schedule stays that of all epochs."""
    seed: NotNegative = 1
    """Decides initial weights, order and augmentation."""
    loss: Literal["cross_entropy", "mse"] = "cross_entropy"
    """What is minimized. cross_entropy: the negative log-likelihood of the label under the softmax of the network's
    outputs; mse: the mean squared difference between the outputs and the label's one-hot vector, or, for
    data.path=line, between the output and y."""
    label_smoothing: Fraction = 0.0
    """Share of each label that is spread over all classes (Szegedy et al. 2016, 7)."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Evaluate and keep a mean of the weights too, of which each step keeps this share; null: none."""
    precision: Literal["float32", "bf16", "float64"] = "float32"
    """bf16: convolutions and matrix products in bfloat16 (autocast), weights in float32; float64 is for proofs."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """What a loss or gradient that is no number does: end the training, leave the step out, or go back to the last
    checkpoint's weights and on with the images after the step."""
    ratios_every: Positive | None = None
    """Write every layer's norms of weights and gradients to the events after so many steps; null: never."""
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    comm: CommSection = CommSection()
    engine: Literal["auto", "native", "compile"] = "auto"
    """native: eager, channels-last, oneDNN; compile: torch.compile on top; auto: native."""
    plan: PlanSection = PlanSection()
    sweep: SweepSection = SweepSection()
    output: str = ""
    """The run's folder; empty: runs/NAME."""

    @model_validator(mode="after")
    def _epochs_fit(self) -> "Recipe":
        warmup = self.schedule.warmup_epochs
        if warmup > self.epochs:
            raise misfit(
                f"schedule.warmup_epochs={warmup:g} is longer than epochs={self.epochs}: "
                f"set schedule.warmup_epochs to {self.epochs} or less, or epochs to {ceil(warmup)} or more",
                "epochs",
                "schedule.warmup_epochs",
            )
        starts = [phase.from_epoch for phase in self.phases]
        if starts != sorted(set(starts)):
            raise misfit(f"phases begin at epochs {starts}: put them in order, each from a later epoch", "phases")
        if starts and starts[-1] >= self.epochs:
            raise misfit(
                f"the last of phases begins at epoch {starts[-1]} (counted from 0), but epochs={self.epochs}: take it "
                f"out, or set epochs to {starts[-1] + 1} or more",
                "epochs",
                "phases",
            )
        return self

    @model_validator(mode="after")
    def _loss_fits(self) -> "Recipe":
        regression = self.data.path == LINE
        wanted: dict[str, tuple[object, object]] = {
            "model.name": (self.model.name, "linear"),
            "model.classes": (self.model.classes or 1, 1),
            "loss": (self.loss, "mse"),
            "label_smoothing": (self.label_smoothing, 0.0),
        }
        for key, (value, right) in wanted.items():
            if regression and value != right:
                raise misfit(
                    f"data.path={LINE} is linear regression, which {key}={value} does not do: set {key}={right}",
                    "data.path",
                    key,
                )
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output or f"runs/{self.name}")
