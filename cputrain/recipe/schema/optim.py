"""The optimizer and the learning rate."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cputrain.recipe.schema.base import Auto, Positive, Rate, Section, misfit

Decay = Annotated[float, Field(ge=0, lt=1)]
OptimizerName = Literal[
    "sgd",
    "momentum",
    "lars",
    "lamb",
    "adam",
    "adamw",
    "rmsprop",
    "adagrad",
    "adadelta",
    "adagrad_da",
]

# What each option serves; where it is set for another optimizer, somebody expects what does not happen.
SERVES = {
    "momentum": ("momentum", "lars", "rmsprop"),
    "nesterov": ("momentum", "lars"),
    "beta1": ("adam", "adamw", "lamb"),
    "beta2": ("adam", "adamw", "lamb"),
    "smoothing": ("rmsprop",),
    "rho": ("adadelta",),
    "epsilon": ("lars", "lamb", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "adagrad_da"),
    "family": ("lars",),
    "trust": ("lars",),
    "trust_clip": ("lars",),
    "momentum_correction": ("lars",),
    "adapt_bn_and_bias": ("lars", "lamb"),
}


class OptimSection(Section):
    """The optimizer."""

    name: OptimizerName = "momentum"
    """The optimizer. sgd is plain stochastic gradient descent and momentum adds momentum to it; lars has a rate for
    each layer, by the ratio of its weights to its gradients (You et al. 2017), and lamb the same around Adam (You et
    al. 2020); adagrad_da is Adagrad's dual averaging (Duchi et al. 2011); adam, adamw, rmsprop, adagrad and adadelta
    are torch's."""
    scale_rate_by: Literal["auto", "batch", "workers", "none"] = "auto"
    """What schedule.peak_rate is scaled by. batch: by the optimizer's scaling rule, from schedule.reference_batch to
    the global batch of the job; workers: peak_rate is one worker's and is multiplied by their number (Horovod's
    `lr * hvd.size()`); none: not at all. auto means batch for peak_rate=auto, and none for a peak_rate that is
    given."""
    momentum: Decay = 0.9
    """The share of the last update that momentum, lars and rmsprop add to the next one."""
    nesterov: bool = False
    """Whether momentum and lars take Nesterov's form of momentum."""
    weight_decay: Rate = 5e-5
    """The factor of the L2 penalty that is added to the gradients; adamw and lamb take it off the weights instead, and
    adagrad_da minimizes it together with the gradients."""
    decay_bn_and_bias: bool = True
    """Whether weight_decay also acts on batch-norm parameters and biases."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Gradients whose norm, over all layers, is larger than this are scaled down to it; null never scales them."""
    beta1: Decay = 0.9
    """The share of the mean gradient that a step of adam, adamw and lamb keeps."""
    beta2: Decay = 0.999
    """The share of the mean squared gradient that a step of adam, adamw and lamb keeps."""
    smoothing: Decay = 0.99
    """The share of the mean squared gradient that a step of rmsprop keeps (torch calls it alpha)."""
    rho: Decay = 0.9
    """The share of the mean squared gradients and updates that a step of adadelta keeps (0.95 in Zeiler 2012)."""
    epsilon: Rate | Auto = "auto"
    """Added to the denominator of the update to keep it from 0. auto is 0 for lars, 1e-6 for lamb, 1e-10 for
    adagrad_da, and torch's own default for adam, adamw, rmsprop, adagrad and adadelta."""
    family: Literal["caffe", "timm", "nus"] = "caffe"
    """Where lars applies learning rate and trust ratio: both inside the momentum (caffe: Intel Caffe, MLPerf's
    TensorFlow), the trust ratio inside (timm), or both outside (nus: NUS, Intel's MLPerf PyTorch)."""
    trust: Annotated[float, Field(gt=0)] = 0.001
    """The trust coefficient of lars."""
    trust_clip: bool = False
    """Whether lars keeps every layer's rate at or below the learning rate."""
    momentum_correction: bool = False
    """Whether lars of family caffe scales its momentum as the rate changes (Goyal et al. 2017, section 3)."""
    adapt_bn_and_bias: bool = False
    """Whether lars and lamb give batch-norm parameters and biases rates of their own too (Intel Caffe), or not
    (MLPerf)."""

    @model_validator(mode="after")
    def _options_are_used(self) -> "OptimSection":
        fields = type(self).model_fields
        for option, served in SERVES.items():
            if self.name not in served and getattr(self, option) != fields[option].default:
                raise misfit(
                    f"optim.{option} is an option of {' or '.join(served)}, not of {self.name}: leave it out",
                    f"optim.{option}",
                    "optim.name",
                )
        if self.momentum_correction and self.family != "caffe":
            raise misfit(
                f"optim.momentum_correction is an option of optim.family=caffe, not of {self.family}: leave it out",
                "optim.momentum_correction",
                "optim.family",
            )
        return self


class ScheduleSection(Section):
    """The learning rate as a function of the step: a gradual, linear warm-up, then down."""

    name: Literal["linear", "poly", "poly_of_all", "steps", "cosine", "constant"] = "linear"
    """How the rate goes down after the warm-up: linear to the last step (the 256-node run); by (1 - progress) to a
    power, the progress counted from the warm-up's end (poly, MLPerf) or from step 0 (poly_of_all, Intel Caffe); by a
    factor at milestones (steps); as half a cosine; or not at all (constant)."""
    start_rate: Rate = 0.0
    """The learning rate of step 0, from which the warm-up rises; it is never scaled."""
    peak_rate: Rate | Auto = "auto"
    """The learning rate at the end of the warm-up, scaled as optim.scale_rate_by says. auto takes the optimizer's rule
    (docs/guides/recipes.md), for example 0.1 x global batch / 256 for momentum."""
    rate_factor: Annotated[float, Field(gt=0)] = 1.0
    """The rule's rate is multiplied by this where peak_rate is auto; the 256-node run halves it."""
    reference_batch: Positive | None = None
    """The global batch, in images, that an explicit peak_rate was tuned for. A job with another global batch is warned,
    or its rate is scaled (optim.scale_rate_by=batch). Setting schedule.peak_rate on the command line drops it."""
    end_rate: Rate = 0.0
    """The learning rate after the last step, for linear, poly, poly_of_all and cosine."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 5.0
    """The length of the warm-up in epochs; 0 starts at the peak rate."""
    power: Annotated[float, Field(gt=0)] = 2.0
    """The power of poly and poly_of_all."""
    milestones: tuple[Annotated[float, Field(gt=0)], ...] = (30.0, 60.0, 80.0)
    """The epochs after which steps multiplies the rate by `factor`."""
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """What steps multiplies the rate by at each milestone."""

    @model_validator(mode="after")
    def _rate_options_fit(self) -> "ScheduleSection":
        if self.peak_rate == "auto" and self.reference_batch is not None:
            raise misfit(
                f"schedule.reference_batch={self.reference_batch} belongs to an explicit schedule.peak_rate, which is "
                "auto: leave it out, or set schedule.peak_rate",
                "schedule.reference_batch",
                "schedule.peak_rate",
            )
        if self.peak_rate != "auto" and self.rate_factor != 1.0:
            raise misfit(
                f"schedule.rate_factor={self.rate_factor:g} multiplies the rate of schedule.peak_rate=auto, which is "
                f"{self.peak_rate:g}: leave it out",
                "schedule.rate_factor",
                "schedule.peak_rate",
            )
        return self
