"""Adagrad by dual averaging: each step computes the weights anew from the initial weights and all gradients so far."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cputrain.optim.groups import GroupOptimizer, check_not_negative


class AdagradDA(GroupOptimizer):
    """Adagrad's primal-dual subgradient update (Duchi, Hazan, Singer 2011, JMLR 12, equation 3), psi centered at w_0.

    After step t, with the learning rates r, gradients g and weight decays d of each step, and with
    H = eps + sqrt(sum of g^2), the weights minimize

        sum of r (<g, w> + d / 2 |w|^2) + 1/2 <w - w_0, H (w - w_0)>,

    which is w = w_0 - (sum of r g + (sum of r d) w_0) / (H + sum of r d). The paper has a constant rate and w_0 = 0.
    Here each step's gradient is weighted by the rate of that step, so that a schedule that ends at 0 does not lead back
    to w_0. TensorFlow 1's AdagradDA always uses w_0 = 0, which sets a network's weights to zero.

    Args:
        params: parameters, or parameter groups with options of their own.
        lr: learning rate.
        weight_decay: L2 penalty d.
        eps: added to the root of the summed squares.

    Raises:
        ValueError: if an option is negative.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        weight_decay: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay, eps=eps)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "eps": eps, "decay_sum": 0.0})

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        initial = self._state_of(params, "initial", lambda p: p.detach().clone())
        sums, squares = (self._state_of(params, name, torch.zeros_like) for name in ("sum", "square_sum"))
        group["decay_sum"] += group["lr"] * group["weight_decay"]
        torch._foreach_add_(sums, grads, alpha=group["lr"])
        torch._foreach_addcmul_(squares, grads, grads)
        scale = torch._foreach_sqrt(squares)
        torch._foreach_add_(scale, group["eps"] + group["decay_sum"])
        change = torch._foreach_add(sums, initial, alpha=group["decay_sum"])
        torch._foreach_div_(change, scale)
        torch._foreach_copy_(params, torch._foreach_sub(initial, change))
