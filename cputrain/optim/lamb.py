"""LAMB: Adam with a learning rate for each layer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cputrain.optim.groups import GroupOptimizer, check_not_negative


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
        ValueError: if an option is negative.
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
        check_not_negative(lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps, "adapt": True, "step": 0}
        super().__init__(params, defaults)

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        group["step"] += 1
        beta1, beta2 = group["betas"]
        averages, squares = (self._state_of(params, name, torch.zeros_like) for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(averages, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        scale = torch._foreach_div(squares, 1 - beta2 ** group["step"])
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, group["eps"])
        updates = torch._foreach_div(averages, 1 - beta1 ** group["step"])
        torch._foreach_div_(updates, scale)
        torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        if group["adapt"]:
            norms = torch.stack(torch._foreach_norm([*params, *updates])).double().tolist()
            pairs = zip(norms[: len(params)], norms[len(params) :], strict=True)
            torch._foreach_mul_(updates, [w / u if w and u else 1.0 for w, u in pairs])
        torch._foreach_add_(params, updates, alpha=-group["lr"])
