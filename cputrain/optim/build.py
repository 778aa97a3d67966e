"""A recipe's optimizer over a model's parameters."""

from torch import nn
from torch.optim import SGD

from cputrain.recipe import OptimSection


def build_optimizer(model: nn.Module, optim: OptimSection) -> SGD:
    """SGD with momentum, v = m v + g + wd w, w -= rate v, in torch's fused CPU form; the rate is set every step."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]  # batch-norm's scale and shift, biases
    groups = [
        {"params": weights, "weight_decay": optim.weight_decay},
        {"params": others, "weight_decay": optim.weight_decay if optim.decay_bn_and_bias else 0.0},
    ]
    return SGD(groups, lr=0.0, momentum=optim.momentum, fused=True)


def set_rate(optimizer: SGD, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
