"""LAMB: Adam with a learning rate for each layer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cputrain.optim.groups import GroupOptimizer, check_below_one, check_not_negative, norms, state_of

MOST_TRUST = 1e38  # what float32 can hold


class Lamb(GroupOptimizer):
    """Layer-wise adaptive moments (You et al. 2020, arXiv:1904.00962, Algorithm 2), phi(z) = z.

    With Adam's bias-corrected averages m of the gradients and v of their squares, u = m / (sqrt(v) + eps)
    + weight_decay w, and w -= lr t u with the trust ratio t = |w| / |u|, 1 where a norm is 0.

    Options are kept in `param_groups`, as torch's optimizers do; a group may have its own, e.g.
    {"params": ..., "adapt": False} for biases and batch-norm, which sets t = 1.

    Args:
        params: parameters, or parameter groups with options of their own.
        lr: learning rate.
        betas: decay rates of the averages m and v.
        weight_decay: decoupled weight decay.
        eps: added to the root of v.

    Raises:
        ValueError: if an option is negative or not finite, or a decay rate 1 or more.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-6,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps, "adapt": True}
        super().__init__(params, defaults)

    def _check(self, options: dict[str, Any]) -> None:
        beta1, beta2 = options["betas"]
        check_not_negative(**{name: options[name] for name in ("lr", "weight_decay", "eps")})
        check_below_one(beta1=beta1, beta2=beta2)

    def _step_group(
        self, group: dict[str, Any], states: list[dict[str, Any]], params: list[Tensor], grads: list[Tensor]
    ) -> None:
        for state in states:  # of each parameter, as some may have had no gradient
            state["step"] = state.get("step", 0) + 1
        steps = [state["step"] for state in states]
        beta1, beta2 = group["betas"]
        averages, squares = (state_of(states, params, name, torch.zeros_like) for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(averages, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        scale = torch._foreach_div(squares, [1 - beta2**step for step in steps])
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, group["eps"])
        updates = torch._foreach_div(averages, [1 - beta1**step for step in steps])
        if group["eps"] == 0:  # without any gradient so far, an element has none of its own to follow
            for each in scale:
                each.masked_fill_(each == 0, 1.0)
        torch._foreach_div_(updates, scale)
        torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        if group["adapt"]:
            pairs = zip(norms(params), norms(updates), strict=True)
            torch._foreach_mul_(updates, [min(w / u, MOST_TRUST) if w and u else 1.0 for w, u in pairs])
        torch._foreach_add_(params, updates, alpha=-group["lr"])
