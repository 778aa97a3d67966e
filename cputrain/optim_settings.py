"""Settings of an optimizer, and what its state needs. They import no torch, unlike cputrain.optim."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from cputrain.settings import Auto, Rate

Decay = Annotated[float, Ge(0), Lt(1)]
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
# Tensors of the weights' size in an optimizer's state, with default options.
COPIES = {
    "sgd": 0,
    "momentum": 1,
    "lars": 1,
    "lamb": 2,
    "adam": 2,
    "adamw": 2,
    "rmsprop": 1,
    "adagrad": 1,
    "adadelta": 2,
    "adagrad_da": 3,
}
TAKE_NORMS = ("lars", "lamb")  # optimizers that read weights and gradients once more, for their norms


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """The optimizer and its options, of which each optimizer uses some."""

    name: OptimizerName = "momentum"
    """Name of the optimizer. sgd: plain stochastic gradient descent; momentum: the same with momentum; lars: momentum
    with layer-wise learning rates (You et al. 2017); lamb: Adam with layer-wise learning rates (You et al. 2020);
    adagrad_da: Adagrad by dual averaging (Duchi et al. 2011); adam, adamw, rmsprop, adagrad and adadelta are
    torch's."""
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
    weights instead (decoupled), adagrad_da adds it to the function that it minimizes; 0 turns it off."""
    decay_bn_and_bias: bool = True
    """Whether weight_decay also applies to batch-norm parameters and biases. In timm's networks these include position
    embeddings and class tokens."""
    clip_norm: Annotated[float, Gt(0)] | None = None
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
    """Small number added to the denominator of the update to avoid division by 0. auto: 0 for lars, 1e-6 for lamb,
    1e-10 for adagrad_da, and torch's default for adam, adamw, rmsprop, adagrad and adadelta, which need a value above
    0; sgd and momentum do not use it."""
    lars_variant: Literal["caffe", "timm", "nus"] = "caffe"
    """Where lars multiplies by learning rate and trust ratio. caffe: both before momentum (Intel Caffe, MLPerf's
    TensorFlow); timm: the trust ratio before, the learning rate after; nus: both after (NUS, Intel's MLPerf
    PyTorch)."""
    trust_coefficient: Annotated[float, Gt(0)] = 0.001
    """Trust coefficient: the factor of each layer's ratio of weight norm to gradient norm. For lars."""
    trust_clip: bool = False
    """Whether to limit each layer's learning rate to the schedule's. For lars."""
    momentum_correction: bool = False
    """Whether momentum is rescaled when the learning rate changes (Goyal et al. 2017, section 3). For lars with
    lars_variant=caffe."""
    adapt_bn_and_bias: bool = False
    """Whether the parameters of decay_bn_and_bias also get layer-wise learning rates, as in Intel Caffe but not in
    MLPerf. For lars and lamb."""

    @property
    def state_copies(self) -> int:
        """Number of tensors of the weights' size in the optimizer's state."""
        if self.name == "momentum" and self.momentum == 0:
            return 0
        return COPIES[self.name] + (self.name == "rmsprop" and self.momentum > 0)
