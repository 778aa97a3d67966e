"""The optimizer."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from affinity.wording import either
from cputrain.recipe.schema.base import Auto, Rate, Section, misfit

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

# The optimizers that read each option; set for another optimizer, it would silently have no effect.
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


class OptimSection(Section):
    """The optimizer. An option that the chosen optimizer does not read is refused."""

    name: OptimizerName = "momentum"
    """Name of the optimizer. sgd: plain stochastic gradient descent; momentum: the same with momentum; lars: momentum
    with a learning rate for each layer (You et al. 2017); lamb: Adam with one (You et al. 2020); adagrad_da: Adagrad by
    dual averaging (Duchi et al. 2011); adam, adamw, rmsprop, adagrad and adadelta are torch's."""
    scale_rate_by: Literal["auto", "batch", "workers", "none"] = "auto"
    """How schedule.peak_rate is scaled to the job. batch: from schedule.reference_batch to the job's global batch, by
    the optimizer's scaling rule; workers: multiplied by the number of workers (Horovod's lr * hvd.size()); none: not at
    all. auto: batch for peak_rate=auto, none for a number."""
    momentum: Decay = 0.9
    """Momentum coefficient: the fraction of the last update added to the next one. For momentum, lars and rmsprop."""
    nesterov: bool = False
    """Whether to use Nesterov momentum. For momentum and lars."""
    weight_decay: Rate = 5e-5
    """Weight decay: the factor of the L2 penalty that is added to the gradients. adamw and lamb subtract it from the
    weights instead (decoupled), adagrad_da minimizes it together with the gradients; 0 turns it off."""
    decay_bn_and_bias: bool = True
    """Whether weight_decay also applies to batch-norm parameters and biases."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Largest norm of the gradient over all layers. Larger gradients are scaled down to it; null: no clipping."""
    beta1: Decay = 0.9
    """Decay factor of the running mean of the gradients, per step. For adam, adamw and lamb."""
    beta2: Decay = 0.999
    """Decay factor of the running mean of the squared gradients, per step. For adam, adamw and lamb."""
    alpha: Decay = 0.99
    """Decay factor of the running mean of the squared gradients, per step. For rmsprop."""
    rho: Decay = 0.9
    """Decay factor of the running means of squared gradients and squared updates, per step. For adadelta; Zeiler 2012
    uses 0.95."""
    epsilon: Rate | Auto = "auto"
    """Small number added to the denominator of the update against division by 0. auto: 0 for lars, 1e-6 for lamb, 1e-10
    for adagrad_da, and torch's default for adam, adamw, rmsprop, adagrad and adadelta; sgd and momentum have none."""
    lars_variant: Literal["caffe", "timm", "nus"] = "caffe"
    """Where lars multiplies by learning rate and trust ratio. caffe: both before momentum (Intel Caffe, MLPerf's
    TensorFlow); timm: the trust ratio before, the learning rate after; nus: both after (NUS, Intel's MLPerf
    PyTorch)."""
    trust_coefficient: Annotated[float, Field(gt=0)] = 0.001
    """Trust coefficient: the factor of each layer's ratio of weight norm to gradient norm. For lars."""
    trust_clip: bool = False
    """Whether no layer's learning rate may exceed the schedule's. For lars."""
    momentum_correction: bool = False
    """Whether momentum is rescaled when the learning rate changes (Goyal et al. 2017, section 3). For lars with
    lars_variant=caffe."""
    adapt_bn_and_bias: bool = False
    """Whether batch-norm parameters and biases also get learning rates by layer. For lars and lamb: Intel Caffe does
    so, MLPerf does not."""

    @model_validator(mode="after")
    def _options_are_read(self) -> "OptimSection":
        fields = type(self).model_fields
        for option, optimizers in OPTIMIZERS_WITH.items():
            if self.name not in optimizers and getattr(self, option) != fields[option].default:
                raise misfit(
                    f"optim.{option} is an option of {either(optimizers)}, not of {self.name}: remove it",
                    f"optim.{option}",
                    "optim.name",
                )
        if self.nesterov and not self.momentum:
            raise misfit(
                "optim.nesterov needs momentum, and optim.momentum is 0: set it above 0, or remove optim.nesterov",
                "optim.nesterov",
                "optim.momentum",
            )
        if self.momentum_correction and self.lars_variant != "caffe":
            raise misfit(
                f"optim.momentum_correction is an option of optim.lars_variant=caffe, not of {self.lars_variant}: "
                "remove it",
                "optim.momentum_correction",
                "optim.lars_variant",
            )
        return self
