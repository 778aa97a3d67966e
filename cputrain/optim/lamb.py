"""LAMB: Adam with a rate for each layer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cputrain.optim.groups import GroupOptimizer


class Lamb(GroupOptimizer):
    """Layer-wise adaptive moments (You et al. 2020, arXiv:1904.00962, Algorithm 2), phi(z) = z.

    m and v are Adam's bias-corrected means of gradients and of their squares, u = m / (sqrt(v) + epsilon)
    + weight_decay w, and w -= rate t u with the trust ratio t = |w| / |u|, 1 where a norm is 0. Parameter groups with
    adapt=False have t = 1.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.0,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        epsilon: float = 1e-6,
    ) -> None:
        self.betas, self.epsilon = betas, epsilon
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "adapt": True, "steps": 0})

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        group["steps"] += 1
        beta1, beta2 = self.betas
        means, squares = (self._state_of(params, name, torch.zeros_like) for name in ("mean", "square"))
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        scale = torch._foreach_div(squares, 1 - beta2 ** group["steps"])
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, self.epsilon)
        updates = torch._foreach_div(means, 1 - beta1 ** group["steps"])
        torch._foreach_div_(updates, scale)
        torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        if group["adapt"]:
            norms = torch.stack(torch._foreach_norm([*params, *updates])).double().tolist()
            pairs = zip(norms[: len(params)], norms[len(params) :], strict=True)
            torch._foreach_mul_(updates, [w / u if w and u else 1.0 for w, u in pairs])
        torch._foreach_add_(params, updates, alpha=-group["lr"])
