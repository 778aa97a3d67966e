"""Adagrad by dual averaging: each step starts anew from the first weights, with all gradients so far."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cputrain.optim.groups import GroupOptimizer


class AdagradDA(GroupOptimizer):
    """Adagrad's primal-dual subgradient update (Duchi, Hazan, Singer 2011, JMLR 12, equation 3), psi centred at w_0.

    After step t, of rates r, gradients g and weight decays d (each of its own step), with H = epsilon
    + sqrt(sum of g^2), the weights minimize

        sum of r (<g, w> + d / 2 |w|^2) + 1/2 <w - w_0, H (w - w_0)>,

    which is w = w_0 - (sum of r g + (sum of r d) w_0) / (H + sum of r d). The paper has one rate and w_0 = 0; a rate
    that changes weighs each step's gradient by its own, so that a schedule that ends at 0 does not lead back to w_0.
    TensorFlow 1's AdagradDA is the update for w_0 = 0 whatever the weights are at first, which zeroes networks.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.0,
        *,
        weight_decay: float = 0.0,
        epsilon: float = 1e-10,
    ) -> None:
        self.epsilon = epsilon
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "decayed": 0.0})

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        first = self._state_of(params, "first", lambda p: p.detach().clone())
        sums, squares = (self._state_of(params, name, torch.zeros_like) for name in ("sum", "square"))
        group["decayed"] += group["lr"] * group["weight_decay"]
        torch._foreach_add_(sums, grads, alpha=group["lr"])
        torch._foreach_addcmul_(squares, grads, grads)
        scale = torch._foreach_sqrt(squares)
        torch._foreach_add_(scale, self.epsilon + group["decayed"])
        away = torch._foreach_add(sums, first, alpha=group["decayed"])
        torch._foreach_div_(away, scale)
        torch._foreach_copy_(params, torch._foreach_sub(first, away))
