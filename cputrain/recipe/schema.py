"""Recipe schema: every section and key, with its type, default and limits. The docstring below a key documents it.

Sections of a part (images, network, optimizer, communication) inherit its settings, where their keys are declared:
data/settings.py, models/settings.py, optim_settings.py and comm/settings.py. So a part takes its section, or the same
settings without a recipe.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cputrain.affinity.errors import Wording, as_argument, as_option
from cputrain.affinity.planner.request import CPUS, NUMBER, RECIPE_OPTIONS, Option
from cputrain.affinity.topology.machine import parse_list
from cputrain.affinity.wording import join_or
from cputrain.comm.settings import CommSettings
from cputrain.data.settings import LINE, USER_SAMPLES, Augmentation, DataSettings, TrainCrop
from cputrain.models.settings import RESNETS, TIMM, TORCHVISION, ModelSettings
from cputrain.optim_settings import OptimSettings
from cputrain.predict.layers import NETWORKS
from cputrain.schedule import Decay
from cputrain.settings import MAX_COUNT, Auto, Fraction, NotNegative, Positive, Rate

MISFIT = "misfit"
# Terminals interpret control characters, and no file name has NUL. The surrogates from U+DC80 to U+DCFF stand for bytes
# that are not UTF-8, which file names may contain.
NO_NAME = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]")
NO_TEXT = re.compile(rf"{NO_NAME.pattern}|[\udc80-\udcff]")
PATHS = ("path", "stage_dir", "weights", "output")
OWN_NETWORKS = tuple(sorted(file.stem for file in NETWORKS.glob("*.json")))
LIBRARY_NETWORK = re.compile(rf"{TORCHVISION}[a-z]\w*|{TIMM}[a-z]\w*(\.\w+)?")

# The optimizers that use each option; others would silently ignore it.
OPTIMIZERS_WITH = {
    "momentum": ("momentum", "lars", "rmsprop"),
    "nesterov": ("momentum", "lars"),
    "beta1": ("adam", "adamw", "lamb"),
    "beta2": ("adam", "adamw", "lamb"),
    "alpha": ("rmsprop",),
    "rho": ("adadelta",),
    "epsilon": ("lars", "lamb", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "adagrad_da"),
    "lars_variant": ("lars",),
    "trust_coefficient": ("lars",),
    "trust_clip": ("lars",),
    "momentum_correction": ("lars",),
    "adapt_bn_and_bias": ("lars", "lamb"),
}
MIN_EPSILON = 1.2e-38
"""The smallest normal number of float32: a smaller epsilon is 0 in torch's optimizers, where 0 / 0 is NaN."""


class Section(BaseModel, frozen=True):
    """A group of recipe keys; it is frozen, and unknown keys are errors.

    The docstring below a field is its description in the reference and in error messages. Its first sentence defines
    the value and its unit, and must be readable on its own.
    """

    # keys.py reads the docstrings, because pydantic would parse this file once per class on every import.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any, about: ValidationInfo) -> Any:
        unfit = NO_NAME if about.field_name in PATHS else NO_TEXT
        if isinstance(value, str) and (found := unfit.search(value)):
            raise ValueError(f"it has {found[0]!a}, which is a control character or not UTF-8; remove it")
        return value


def misfit(message: str, *keys: str) -> PydanticCustomError:
    """Return the error for values that are valid individually but contradict each other.

    `keys` are the dotted keys involved; the message points to the first of them that the user has set.
    """
    return PydanticCustomError(MISFIT, "{message}", {"message": message, "keys": keys})


class PhaseSection(Section, frozen=True):
    """Settings that replace the recipe's from an epoch on. A null key keeps the value of the previous phase."""

    from_epoch: NotNegative
    """First epoch of the phase, counted from 0. Phases are listed in the order of their epochs."""
    crop: Positive | None = None
    """Side of the training images in pixels, in place of data.crop. Evaluation keeps data.crop; null: no change."""
    train_crop: TrainCrop | None = None
    """How training images are cropped, in place of data.train_crop; null: no change."""
    weight_decay: Rate | None = None
    """Weight decay factor, in place of optim.weight_decay; null: no change."""
    restart_rate: Rate | None = None
    """Learning rate at which the schedule restarts at the phase's first step. From there it decays to 0 at the last
    step of the training, as a polynomial of power restart_power; null: the schedule continues."""
    restart_power: Annotated[float, Field(gt=0)] = 2.0
    """Power of the polynomial decay after restart_rate. 1 is a linear decay; without restart_rate it has no effect."""


class AugmentSection(Section, Augmentation, frozen=True):
    """Random changes to a training image after cropping, drawn anew for each image and epoch; 0 turns a change off."""

    mixup: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Parameter alpha of mixup (Zhang et al. 2018; usually 0.2). The images of a worker's batch and their labels are
    averaged in pairs, by weights from a Beta(alpha, alpha) distribution."""
    cutmix: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Parameter alpha of CutMix (Yun et al. 2019; usually 1). A rectangle of each image is replaced by the same
    rectangle of another image, and the labels are mixed in proportion. With mixup, each batch uses one of the two."""


class DataSection(Section, DataSettings, frozen=True):
    """The training and validation data, and how images are read, cropped and normalized."""

    augment: AugmentSection = AugmentSection()


class ModelSection(Section, ModelSettings, frozen=True):
    """The network, its batch-norm and its initial weights."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in OWN_NETWORKS or LIBRARY_NETWORK.fullmatch(name):
            return name
        near = get_close_matches(name, OWN_NETWORKS, n=1, cutoff=0.5)
        libraries = [f"{library}{name}" for library in (TORCHVISION, TIMM)]
        meant = [*near, *filter(LIBRARY_NETWORK.fullmatch, libraries)]
        known = f"did you mean {join_or(meant)}?" if meant else f"known are {join_or(OWN_NETWORKS)}"
        raise ValueError(f"unknown network, {known}")

    @model_validator(mode="after")
    def _options_fit(self) -> "ModelSection":
        if self.zero_gamma not in ("none", "auto") and self.name not in RESNETS:
            raise misfit(
                f"model.zero_gamma={self.zero_gamma} is an option of {', '.join(RESNETS)}, not of {self.name}: "
                "set model.zero_gamma=none",
                "model.name",
                "model.zero_gamma",
            )
        if self.resnet_version != "v1.5" and self.name not in RESNETS[2:]:
            raise misfit(
                f"model.resnet_version={self.resnet_version} is an option of {', '.join(RESNETS[2:])}, not of "
                f"{self.name}: set model.resnet_version=v1.5",
                "model.name",
                "model.resnet_version",
            )
        if self.bn_ghost_batch is not None and self.bn_stats != "local":
            raise misfit(
                f"model.bn_ghost_batch={self.bn_ghost_batch} is an option of model.bn_stats=local, not of "
                f"{self.bn_stats}: set model.bn_ghost_batch=null",
                "model.bn_stats",
                "model.bn_ghost_batch",
            )
        return self


class OptimSection(Section, OptimSettings, frozen=True):
    """The optimizer. An option that the chosen optimizer does not use is an error."""

    @model_validator(mode="after")
    def _options_are_read(self) -> "OptimSection":
        fields = type(self).model_fields
        for option, optimizers in OPTIMIZERS_WITH.items():
            if self.name not in optimizers and getattr(self, option) != fields[option].default:
                raise misfit(
                    f"optim.{option} is an option of {join_or(optimizers)}, not of {self.name}: remove it",
                    f"optim.{option}",
                    "optim.name",
                )
        if self.nesterov and not self.momentum:
            raise misfit(
                "optim.nesterov needs momentum, and optim.momentum is 0: set it above 0, or remove optim.nesterov",
                "optim.nesterov",
                "optim.momentum",
            )
        divides = self.name in OPTIMIZERS_WITH["epsilon"] and self.name not in ("lars", "lamb", "adagrad_da")
        if divides and self.epsilon != "auto" and self.epsilon < MIN_EPSILON:
            raise misfit(
                f"optim.epsilon={self.epsilon:g} turns weights without a gradient into NaN in {self.name}: set it to "
                f"{MIN_EPSILON} or more, or to auto",
                "optim.epsilon",
                "optim.name",
            )
        if self.momentum_correction and self.lars_variant != "caffe":
            raise misfit(
                f"optim.momentum_correction is an option of optim.lars_variant=caffe, not of {self.lars_variant}: "
                "remove it",
                "optim.momentum_correction",
                "optim.lars_variant",
            )
        return self


class BatchSection(Section, frozen=True):
    """Images per step: either local x workers x accumulation, or a fixed global batch for any number of workers."""

    local: Positive = 32
    """Images in one backward pass of one worker. With batch.global it is the upper limit instead."""
    accumulation: Positive = 1
    """Gradient accumulation steps: backward passes of each worker whose gradients are summed before one update."""
    global_: Positive | None = Field(default=None, alias="global")
    """Images in one step over all workers. Workers get equal shares (up to one image, if it does not divide evenly) and
    accumulate gradients as often as batch.local requires; null: local x workers x accumulation. Setting it on the
    command line discards the recipe's batch.accumulation."""

    @model_validator(mode="after")
    def _accumulation_is_decided_once(self) -> "BatchSection":
        if self.global_ is not None and self.accumulation != 1:
            raise misfit(
                f"batch.global={self.global_} already decides the gradient accumulation steps: remove "
                f"batch.accumulation={self.accumulation}",
                "batch.accumulation",
                "batch.global",
            )
        return self


class EvaluateSection(Section, frozen=True):
    """Evaluation on all validation images: exact loss, top-1 and top-5 accuracy."""

    every_epochs: Positive | None = 1
    """Number of epochs between evaluations; null: once, after the last epoch."""
    batch: Positive | None = None
    """Images in one forward pass of one worker during evaluation; null: batch.local."""


class CheckpointSection(Section, frozen=True):
    """Checkpoints of the training state, from which `cputrain train --resume` continues."""

    every_epochs: Positive | None = 1
    """Number of epochs between checkpoints. A checkpoint is also saved before every evaluation, so that its failure
    loses nothing, and after the last step; null: only these."""
    every_minutes: Annotated[float, Field(gt=0)] | None = 5.0
    """Minutes between checkpoints within an epoch: the most that a crash can cost, unless one step takes longer. They
    are written in the background; null: none."""
    every_steps: Positive | None = None
    """Number of steps between checkpoints within an epoch, in place of every_minutes; null: none."""
    keep: Positive = 2
    """Number of checkpoints to keep: the newest ones. The best one (checkpoints/best) is kept in addition. With 1,
    there is no older one to fall back to if a file is damaged."""


class CommSection(Section, CommSettings, frozen=True):
    """Communication of gradients between the workers."""


def _cpus(value: str) -> str:
    if value != "all" and not parse_list(value):
        raise ValueError("give all, or a list of CPUs as in 0-15,32")
    return value


def _plan_key(option: Option) -> tuple[Any, Any]:
    """Return the type and the field of a planning option."""
    values: Any = Literal.__getitem__(option.choices) if option.choices else bool
    if option.kind == NUMBER:
        values = Annotated[int, Field(ge=option.least, le=MAX_COUNT)] | Auto
    elif option.kind == CPUS:
        values = Annotated[str, AfterValidator(_cpus)]
    return values, Field(default=option.default, description=option.manual)


if TYPE_CHECKING:

    class PlanSection(Section, frozen=True):
        """The keys of the planning options."""

        def __init__(self, **keys: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    PlanSection = create_model(
        "PlanSection",
        __base__=Section,
        __module__=__name__,
        __doc__="Requests to the planner of workers, threads and cores; auto leaves a choice to the planner.",
        **{option.name: _plan_key(option) for option in RECIPE_OPTIONS},
    )


class ScheduleSection(Section, frozen=True):
    """The learning rate of each step: a linear warm-up from start_rate to peak_rate, then a decay."""

    name: Decay = "linear"
    """Decay of the learning rate after the warm-up. linear: a straight line to end_rate; poly: a polynomial of the
    remaining steps (MLPerf); poly_from_start: the same, but counted from step 0 (Intel Caffe); steps: multiplied by
    milestone_factor at each milestone; cosine: half a cosine; constant: no decay."""
    start_rate: Rate = 0.0
    """Learning rate of the first step, at which the warm-up starts. It is not scaled with batch or workers, and has no
    effect without a warm-up."""
    peak_rate: Rate | Auto = "auto"
    """Learning rate at the end of the warm-up, before optim.scale_rate_by. auto: by the optimizer's scaling rule, which
    for momentum is 0.1 x global batch / 256; lars, adagrad, adadelta and adagrad_da have no rule and need a number."""
    auto_rate_factor: Annotated[float, Field(gt=0)] = 1.0
    """Factor by which the learning rate of peak_rate=auto is multiplied. Setting peak_rate to a number on the command
    line resets it to 1."""
    reference_batch: Positive | None = None
    """Global batch, in images, for which a numeric peak_rate was tuned. A job with another global batch prints a
    warning, or scales the rate (optim.scale_rate_by=batch). Setting peak_rate on the command line resets it to null
    (unknown)."""
    end_rate: Rate = 0.0
    """Learning rate after the last step. For linear, poly, poly_from_start and cosine."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 5.0
    """Length of the warm-up in epochs, which may be fractional. 0 starts at the peak rate; it cannot exceed epochs."""
    power: Annotated[float, Field(gt=0)] = 2.0
    """Power of the polynomial decay. For poly and poly_from_start; 1 is a straight line."""
    milestones: tuple[Annotated[float, Field(gt=0)], ...] = (30.0, 60.0, 80.0)
    """Epochs after which the learning rate is multiplied by milestone_factor. For steps; milestones after the last
    epoch have no effect."""
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


class SweepSection(Section, frozen=True):
    """The trainings of `cputrain sweep`: this recipe with other settings. `cputrain train` ignores the section."""

    grid: dict[str, tuple[str | int | float | bool | None, ...]] = Field(default={})
    """Values to try for each key, as in {batch.local: [32, 64]}. Every combination of the values is trained; empty: no
    grid."""
    runs: tuple[str, ...] = ()
    """Settings to use together, as in "optim.name=sgd schedule.peak_rate=0.5". Each entry is combined with every point
    of the grid; empty: the recipe's own settings."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSettings:
    """Settings of an epoch: side of the training images in pixels, how they are cropped, and the weight decay."""

    crop: int
    train_crop: TrainCrop
    weight_decay: float


class Recipe(Section, frozen=True):
    """The settings of a training: what it computes, and how it runs."""

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
    """Number of steps after which the training stops early, for trials. The learning-rate schedule still spans all
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
    and saved in addition to the trained weights; null: no average."""
    precision: Literal["auto", "float32", "bf16", "float64"] = "float32"
    """Number format of the computation. bf16: convolutions and matrix products in bfloat16 (autocast), weights in
    float32; float64: to check exactness. auto: bf16 if this CPU trains this network at least 1.3 times as fast with it,
    else float32; the first start measures some steps, keeps the result for this host, and a resumed run keeps its
    choice."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """What to do when a loss or gradient becomes NaN or infinite. stop: end the training with an error; skip: make no
    update in this step; rollback: reload the last checkpoint's weights and continue with the next images."""
    log_norms_every_steps: Positive | None = None
    """Number of steps between records of every layer's weight norm, gradient norm and trust ratio in events.jsonl;
    null: no records."""
    compare_weights_every_steps: Positive | None = 100
    """Number of steps between comparisons of the workers' weights and optimizer state; null: none. They must be
    identical bit for bit: a difference, as from faulty memory or a faulty processor, ends the training. They are also
    compared before every checkpoint."""
    log: tuple[Literal["csv", "mlflow", "mlperf", "tensorboard", "wandb"], ...] = ()
    """Formats in which the run is logged in addition to events.jsonl, in its folder metrics/. csv: steps.csv and
    epochs.csv; mlperf: lines in the format of MLPerf's rules; tensorboard: scalars; mlflow, wandb: parameters, metrics
    and report to the experiment tracker that its own variables name. tensorboard, mlflow and wandb need the extra of
    that name, as in cputrain[mlflow]; empty: none."""
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    comm: CommSection = CommSection()
    engine: Literal["auto", "native", "eager", "compile", "ipex"] = "auto"
    """How torch runs the network, always channels-last and with oneDNN. eager: operator by operator; native: with
    kernels of cputrain, compiled once, that fuse batch-norm, residual and ReLU, for evaluation with batch-norm folded
    into the convolutions, and with kernels below torch's operators, unless CPUTRAIN_KERNELS=off; compile:
    torch.compile; ipex: Intel's extension for PyTorch, for torch 2.8. auto: native, or eager without a C++ compiler or
    for a network of your own without Conv2d and BatchNorm2d layers, but with the kernels below operators, unless
    `cputrain tune` found another engine faster on this machine; a training does not measure them itself."""
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

    @property
    def planned_precision(self) -> Literal["float32", "bf16", "float64"]:
        """The precision to plan for: of "auto" float32, whose activations take more memory than bf16's."""
        return "float32" if self.precision == "auto" else self.precision

    def in_precision(self, precision: str) -> "Recipe":
        """Return the recipe in this precision if its own is "auto"."""
        return self.model_copy(update={"precision": precision}) if self.precision == "auto" else self

    def as_planned(self) -> "Recipe":
        """Return the recipe in the precision that it is planned for: only the start of a training chooses another."""
        return self.in_precision(self.planned_precision)

    @property
    def evaluation_batch(self) -> int:
        """Images of one forward pass of an evaluation."""
        return self.evaluate.batch or self.batch.local

    @property
    def largest_crop(self) -> int:
        """Side of the largest training images, in pixels."""
        return max([self.data.crop, *(phase.crop for phase in self.phases if phase.crop)])

    @property
    def wording(self) -> Wording:
        """How messages spell `resume` and `overwrite`: as arguments of `cputrain.train` for a script's run, else as
        options."""
        return as_argument if self.data.path == USER_SAMPLES else as_option

    @property
    def mlperf_settings(self) -> dict[str, object]:
        """Settings by their names in MLPerf's log."""
        return {
            "submission_benchmark": self.model.name,
            "seed": self.seed,
            "opt_name": self.optim.name,
            "opt_weight_decay": self.optim.weight_decay,
            "opt_learning_rate_warmup_epochs": self.schedule.warmup_epochs,
            "gradient_accumulation_steps": self.batch.accumulation,
        }

    def at_epoch(self, epoch: int) -> EpochSettings:
        """Return the settings of an epoch, counted from 0: each from the last phase so far that sets it, or the
        recipe."""
        crop, train_crop, weight_decay = self.data.crop, self.data.train_crop, self.optim.weight_decay
        for phase in self.phases:
            if phase.from_epoch <= epoch:
                crop = phase.crop or crop
                train_crop = phase.train_crop or train_crop
                weight_decay = weight_decay if phase.weight_decay is None else phase.weight_decay
        return EpochSettings(crop=crop, train_crop=train_crop, weight_decay=weight_decay)

    def with_absolute_paths(self) -> "Recipe":
        """Return the recipe with absolute paths, for use in any working directory."""

        def absolute(path: str | None) -> str | None:
            return None if path is None else str(Path(path).absolute())

        path = self.data.path if self.data.generated else absolute(self.data.path)
        data = self.data.model_copy(update={"path": path, "stage_dir": absolute(self.data.stage_dir)})
        model = self.model.model_copy(update={"weights": absolute(self.model.weights)})
        return self.model_copy(update={"data": data, "model": model, "output": str(self.folder.absolute())})
