"""A recipe's optimizer over a model's parameters."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Optimizer, RMSprop

from cputrain.optim.adagrad_da import AdagradDA
from cputrain.optim.lamb import Lamb
from cputrain.optim.lars import Lars
from cputrain.recipe.schema import OptimSection

Groups = list[dict[str, Any]]


def build_optimizer(model: nn.Module, optim: OptimSection) -> Optimizer:
    """The optimizer over all parameters that are trained; rate and weight decay are set every step.

    Batch-norm's parameters and biases are a group of their own.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    of_layers = {"params": [p for p in trained if p.ndim > 1], "decays": True}
    of_channels = {
        "params": [p for p in trained if p.ndim <= 1],
        "decays": optim.decay_bn_and_bias,
        "adapt": optim.adapt_bn_and_bias,
    }
    optimizer = OPTIMIZERS[optim.name]([of_layers, of_channels], optim)
    set_rate(optimizer, 0.0, optim.weight_decay)
    return optimizer


def set_rate(optimizer: Optimizer, rate: float, weight_decay: float) -> None:
    """Set the learning rate of all parameter groups, and the penalty of those that it falls on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


def _lars(groups: Groups, optim: OptimSection) -> Optimizer:
    return Lars(
        groups,
        momentum=optim.momentum,
        family=optim.lars_variant,
        trust=optim.trust_coefficient,
        nesterov=optim.nesterov,
        clip=optim.trust_clip,
        correct=optim.momentum_correction,
        **_epsilon(optim, "epsilon"),
    )


def _epsilon(optim: OptimSection, name: str = "eps") -> dict[str, Any]:
    return {} if optim.epsilon == "auto" else {name: optim.epsilon}


def _adam(groups: Groups, optim: OptimSection) -> dict[str, Any]:
    return {"params": groups, "lr": 0.0, "betas": (optim.beta1, optim.beta2)}


# torch's, in the form that passes over the weights once where it has one for CPUs.
OPTIMIZERS: dict[str, Callable[[Groups, OptimSection], Optimizer]] = {
    "sgd": lambda groups, _: SGD(groups, lr=0.0, fused=True),
    "momentum": lambda groups, o: SGD(groups, lr=0.0, momentum=o.momentum, nesterov=o.nesterov, fused=True),
    "lars": _lars,
    "lamb": lambda groups, o: Lamb(**_adam(groups, o), **_epsilon(o, "epsilon")),
    "adam": lambda groups, o: Adam(**_adam(groups, o), **_epsilon(o), fused=True),
    "adamw": lambda groups, o: AdamW(**_adam(groups, o), **_epsilon(o), fused=True),
    "rmsprop": lambda groups, o: RMSprop(
        groups, lr=0.0, alpha=o.alpha, momentum=o.momentum, foreach=True, **_epsilon(o)
    ),
    "adagrad": lambda groups, o: Adagrad(groups, lr=0.0, fused=True, **_epsilon(o)),
    "adadelta": lambda groups, o: Adadelta(groups, lr=0.0, rho=o.rho, foreach=True, **_epsilon(o)),
    "adagrad_da": lambda groups, o: AdagradDA(groups, **_epsilon(o, "epsilon")),
}
