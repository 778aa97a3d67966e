"""The optimizer and the learning rate."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cputrain.schema.base import Auto, Rate, Section

Decay = Annotated[float, Field(ge=0, lt=1)]

# What each option serves; where it is set for another optimizer, somebody expects what does not happen.
SERVES = {
    "momentum": ("momentum", "lars", "rmsprop"),
    "nesterov": ("momentum", "lars"),
    "beta1": ("adam", "adamw", "lamb"),
    "beta2": ("adam", "adamw", "lamb"),
    "smoothing": ("rmsprop",),
    "epsilon": ("lars", "lamb", "adam", "adamw", "rmsprop", "adagrad"),
    "family": ("lars",),
    "trust": ("lars",),
    "trust_clip": ("lars",),
    "momentum_correction": ("lars",),
    "adapt_bn_and_bias": ("lars", "lamb"),
}


class OptimSection(Section):
    """The optimizer."""

    name: Literal["sgd", "momentum", "lars", "lamb", "adam", "adamw", "rmsprop", "adagrad"] = "momentum"
    """sgd: plain stochastic gradient descent; momentum: with momentum; lars: with a rate for each layer, by the ratio
    of its weights to its gradients (You et al. 2017); lamb: the same around Adam (You et al. 2020); and torch's."""
    momentum: Decay = 0.9
    """Of momentum, lars, rmsprop: share of the last update that is kept."""
    nesterov: bool = False
    """Of momentum, lars: Nesterov's form."""
    weight_decay: Rate = 5e-5
    """L2 penalty on the weights; of adamw and lamb: taken off the weights themselves."""
    decay_bn_and_bias: bool = True
    """Whether the penalty also falls on batch-norm parameters and biases."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Gradients whose norm, all layers together, is larger are scaled down to it."""
    beta1: Decay = 0.9
    """Of adam, adamw, lamb: share of the mean gradient that a step keeps."""
    beta2: Decay = 0.999
    """Of adam, adamw, lamb: share of the mean squared gradient that a step keeps."""
    smoothing: Decay = 0.99
    """Of rmsprop: share of the mean squared gradient that a step keeps."""
    epsilon: Rate | Auto = "auto"
    """Added to the denominator; auto: 0 of lars, 1e-6 of lamb, torch's own of adam, adamw, rmsprop, adagrad."""
    family: Literal["caffe", "timm", "nus"] = "caffe"
    """Of lars, where rate and trust ratio stand: both inside the momentum (caffe: Intel Caffe, MLPerf's TensorFlow),
    the trust ratio inside (timm), both outside (nus: NUS, Intel's MLPerf PyTorch)."""
    trust: Annotated[float, Field(gt=0)] = 0.001
    """Of lars: the trust coefficient."""
    trust_clip: bool = False
    """Of lars: no layer learns faster than the rate."""
    momentum_correction: bool = False
    """Of lars' family caffe: the momentum is scaled as the rate changes (Goyal et al. 2017, 3)."""
    adapt_bn_and_bias: bool = False
    """Of lars, lamb: whether batch-norm parameters and biases have a rate of their own too (Intel Caffe), or not
    (MLPerf)."""

    @model_validator(mode="after")
    def _options_are_used(self) -> "OptimSection":
        fields = type(self).model_fields
        for option, served in SERVES.items():
            if self.name not in served and getattr(self, option) != fields[option].default:
                raise ValueError(f"optim.{option} is for {' or '.join(served)}, not {self.name}: leave it out")
        if self.momentum_correction and self.family != "caffe":
            raise ValueError("optim.momentum_correction is family caffe's alone, whose momentum holds the rate")
        return self


class ScheduleSection(Section):
    """The learning rate as a function of the step: a gradual, linear warm-up, then down."""

    name: Literal["linear", "poly", "poly_of_all", "steps", "cosine", "constant"] = "linear"
    """The way down after the warm-up: linear to the last step (the 256-node run); (1 - progress) to a power, the
    progress counted from the warm-up's end (poly, MLPerf) or from step 0 (poly_of_all, Intel Caffe); a factor at
    milestones; half a cosine; or none."""
    start_rate: Rate = 0.0
    """Learning rate of step 0."""
    peak_rate: Rate | Auto = "auto"
    """Learning rate at the end of warm-up; auto: rate_factor x 0.1 x global batch / 256 (Goyal et al. 2017, 2.1)."""
    rate_factor: Annotated[float, Field(gt=0)] = 1.0
    """What peak_rate=auto makes of the linear-scaling rule; the 256-node run halves it."""
    end_rate: Rate = 0.0
    """Learning rate after the last step, of linear, poly, poly_of_all and cosine."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 5.0
    """Length of the warm-up."""
    power: Annotated[float, Field(gt=0)] = 2.0
    """Of poly and poly_of_all."""
    milestones: tuple[Annotated[float, Field(gt=0)], ...] = (30.0, 60.0, 80.0)
    """Epochs after which steps multiplies the rate by `factor`."""
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Of steps."""
