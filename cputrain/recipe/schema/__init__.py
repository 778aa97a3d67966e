"""The schema of a recipe: every key with its type, range, default and description."""

from math import ceil
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from cputrain.recipe.schema.base import Fraction, Positive, Section, misfit
from cputrain.recipe.schema.data import LINE, AugmentSection, DataSection
from cputrain.recipe.schema.model import ModelSection
from cputrain.recipe.schema.optim import OptimSection
from cputrain.recipe.schema.phase import PhaseSection
from cputrain.recipe.schema.run import BatchSection, CheckpointSection, CommSection, EvaluateSection, PlanSection
from cputrain.recipe.schema.schedule import ScheduleSection
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
    """A training: everything that decides what it computes, and how it runs."""

    name: str = "training"
    """Name of the training, in outputs, reports and the default output folder."""
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    batch: BatchSection = BatchSection()
    optim: OptimSection = OptimSection()
    schedule: ScheduleSection = ScheduleSection()
    phases: tuple[PhaseSection, ...] = ()
    """Changes of crops, weight decay and learning rate from given epochs on; empty: the same settings in all epochs."""
    epochs: Positive = 90
    """Number of passes over the training images."""
    max_steps: Positive | None = None
    """Number of steps after which the training stops early, for trials. The learning-rate schedule stays that of all
    epochs; null: no limit."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 1
    """Random seed of the initial weights, the order of the images and their augmentation."""
    loss: Literal["cross_entropy", "mse"] = "cross_entropy"
    """Loss that the training minimizes. cross_entropy: softmax cross-entropy with the label; mse: mean squared
    difference between the outputs and the label's one-hot vector, or y for data.path=line."""
    label_smoothing: Fraction = 0.0
    """Fraction of each label that is spread evenly over all classes (Szegedy et al. 2016, section 7). 0: no
    smoothing."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay factor of an exponential moving average (EMA) of the weights, per step. The averaged weights are evaluated
    and saved besides the others; null: no average."""
    precision: Literal["float32", "bf16", "float64"] = "float32"
    """Number format of the computation. bf16: convolutions and matrix products in bfloat16 (autocast), weights in
    float32; float64 is for checks of exactness."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """What to do when a loss or gradient becomes NaN or infinite. stop: end the training with an error; skip: make no
    update in this step; rollback: reload the last checkpoint's weights and continue with the next images."""
    log_norms_every_steps: Positive | None = None
    """Number of steps between records of every layer's weight norm, gradient norm and trust ratio in events.jsonl;
    null: no records."""
    compare_weights_every_steps: Positive | None = 100
    """Number of steps between comparisons of the workers' weights and optimizer state; null: none. They have to be the
    same bit for bit: faulty memory or a faulty processor ends the training instead of spoiling it. They are also
    compared before every checkpoint."""
    log: tuple[Literal["csv", "mlperf", "tensorboard"], ...] = ()
    """Formats in which the run is logged besides events.jsonl, in its folder metrics/. csv: steps.csv and epochs.csv;
    mlperf: lines as MLPerf's rules have them; tensorboard: scalars, which needs the extra cputrain[tensorboard]; empty:
    none."""
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    comm: CommSection = CommSection()
    engine: Literal["auto", "native", "eager", "compile", "ipex"] = "auto"
    """How torch runs the network, always channels-last and with oneDNN. eager: operator by operator; native: with
    kernels of cputrain, compiled once, that compute batch-norm, residual and ReLU together, and for evaluation with
    batch-norm folded into the convolutions; compile: torch.compile; ipex: Intel's extension for PyTorch, for torch 2.8.
    auto: native, or eager without a C++ compiler, unless `cputrain tune` has found another faster on this machine; a
    training measures none itself."""
    plan: PlanSection = PlanSection()
    sweep: SweepSection = SweepSection()
    output: str = ""
    """Folder of the run: its events, checkpoints, logs and report; empty: runs/NAME."""

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
            raise misfit(f"phases start at epochs {starts}: list them in order, each from a later epoch", "phases")
        if starts and starts[-1] >= self.epochs:
            raise misfit(
                f"the last phase starts at epoch {starts[-1]} (counted from 0), but epochs={self.epochs}: remove it, "
                f"or set epochs to {starts[-1] + 1} or more",
                "epochs",
                "phases",
            )
        return self

    @model_validator(mode="after")
    def _loss_fits(self) -> "Recipe":
        regression = self.data.path == LINE
        required: dict[str, tuple[object, object]] = {
            "model.name": (self.model.name, "linear"),
            "model.classes": (self.model.classes or 1, 1),
            "loss": (self.loss, "mse"),
            "label_smoothing": (self.label_smoothing, 0.0),
        }
        for key, (value, right) in required.items():
            if regression and value != right:
                raise misfit(
                    f"data.path={LINE} is linear regression, which does not work with {key}={value}: set {key}={right}",
                    "data.path",
                    key,
                )
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output or f"runs/{self.name}")
