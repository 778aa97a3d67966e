"""The optimizer of a recipe, and each layer's norms and trust ratio."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Optimizer, RMSprop

from cputrain.optim.lars import AdagradDA, Lamb, Lars, norms, trust_ratios, widened
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


@torch.no_grad()
def layer_ratios(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """|w|, |g|, |w| / |g| and LARS' trust ratio of each trained parameter before its update, in the model's order.

    As in You et al. 2018, Table 3. `ratio` is None where |g| is 0, `trust` where the optimizer is not LARS.
    """
    named = {p: name for name, p in model.named_parameters() if p.grad is not None}
    trust: dict[Any, float] = {}
    if isinstance(optimizer, Lars):
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            trust |= dict(zip(params, trust_ratios(group, params, [p.grad for p in params]), strict=True))
    rows = []
    for p, name in named.items():
        weights, gradients = norms([widened(p), widened(p.grad)])  # type: ignore[arg-type]
        rows.append(
            {
                "layer": name,
                "weights": weights,
                "gradients": gradients,
                "ratio": weights / gradients if gradients else None,
                "trust": trust.get(p),
            }
        )
    return rows
