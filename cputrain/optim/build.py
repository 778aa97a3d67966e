"""The optimizer of a recipe, over a model's parameters."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Optimizer, RMSprop

from cputrain.optim.adagrad_da import AdagradDA
from cputrain.optim.lamb import Lamb
from cputrain.optim.lars import Lars
from cputrain.recipe.schema import OptimSection

ParamGroups = list[dict[str, Any]]


def build_optimizer(model: nn.Module, optim: OptimSection) -> Optimizer:
    """The optimizer over all parameters that require gradients, with lr=0: the learning rate is set before every step.

    Biases and batch-norm parameters are a group of their own.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    layers = {"params": [p for p in trained if p.ndim > 1], "decays": True}
    channels = {
        "params": [p for p in trained if p.ndim <= 1],
        "decays": optim.decay_bn_and_bias,
        "adapt": optim.adapt_bn_and_bias,
    }
    optimizer = OPTIMIZERS[optim.name]([layers, channels], optim)
    set_lr_and_decay(optimizer, 0.0, optim.weight_decay)
    return optimizer


def set_lr_and_decay(optimizer: Optimizer, lr: float, weight_decay: float) -> None:
    """Set the learning rate of all parameter groups, and the weight decay of the groups that decay."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


def _lars(groups: ParamGroups, optim: OptimSection) -> Optimizer:
    return Lars(
        groups,
        lr=0.0,
        momentum=optim.momentum,
        variant=optim.lars_variant,
        trust_coefficient=optim.trust_coefficient,
        nesterov=optim.nesterov,
        trust_clip=optim.trust_clip,
        momentum_correction=optim.momentum_correction,
        **_eps(optim),
    )


def _eps(optim: OptimSection) -> dict[str, Any]:
    return {} if optim.epsilon == "auto" else {"eps": optim.epsilon}


def _adam(groups: ParamGroups, optim: OptimSection) -> dict[str, Any]:
    return {"params": groups, "lr": 0.0, "betas": (optim.beta1, optim.beta2), **_eps(optim)}


# torch's optimizers use the fused implementation where they have one for CPUs: it passes over the weights once.
OPTIMIZERS: dict[str, Callable[[ParamGroups, OptimSection], Optimizer]] = {
    "sgd": lambda groups, _: SGD(groups, lr=0.0, fused=True),
    "momentum": lambda groups, o: SGD(groups, lr=0.0, momentum=o.momentum, nesterov=o.nesterov, fused=True),
    "lars": _lars,
    "lamb": lambda groups, o: Lamb(**_adam(groups, o)),
    "adam": lambda groups, o: Adam(**_adam(groups, o), fused=True),
    "adamw": lambda groups, o: AdamW(**_adam(groups, o), fused=True),
    "rmsprop": lambda groups, o: RMSprop(groups, lr=0.0, alpha=o.alpha, momentum=o.momentum, foreach=True, **_eps(o)),
    "adagrad": lambda groups, o: Adagrad(groups, lr=0.0, fused=True, **_eps(o)),
    "adadelta": lambda groups, o: Adadelta(groups, lr=0.0, rho=o.rho, foreach=True, **_eps(o)),
    "adagrad_da": lambda groups, o: AdagradDA(groups, lr=0.0, **_eps(o)),
}
