"""A recipe's optimizer over a model's parameters."""

from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from cputrain.optim.lars import Lars
from cputrain.recipe import OptimSection


def build_optimizer(model: nn.Module, optim: OptimSection) -> Optimizer:
    """SGD with momentum in torch's fused CPU form, v = m v + g + wd w, w -= rate v, or LARS.

    The rate is set every step.
    """
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": optim.weight_decay},
        {
            # batch-norm's scale and shift, biases
            "params": [p for p in model.parameters() if p.ndim <= 1],
            "weight_decay": optim.weight_decay if optim.decay_bn_and_bias else 0.0,
        },
    ]
    if optim.name == "lars":
        groups[1]["adapt"] = optim.adapt_bn_and_bias
        return Lars(
            groups,
            momentum=optim.momentum,
            family=optim.family,
            trust=optim.trust,
            epsilon=optim.epsilon,
            nesterov=optim.nesterov,
            clip=optim.trust_clip,
            correct=optim.momentum_correction,
        )
    return SGD(groups, lr=0.0, momentum=optim.momentum, nesterov=optim.nesterov, fused=True)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
