"""Adagrad by dual averaging: each step computes the weights anew from the initial weights and all gradients so far."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cputrain.optim.groups import GroupOptimizer, check_not_negative, state_of


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
        ValueError: if an option is negative or not finite.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        weight_decay: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "eps": eps})

    def _check(self, options: dict[str, Any]) -> None:
        check_not_negative(**{name: options[name] for name in ("lr", "weight_decay", "eps")})

    def _step_group(
        self, group: dict[str, Any], states: list[dict[str, Any]], params: list[Tensor], grads: list[Tensor]
    ) -> None:
        decay_sums = []
        for state in states:
            state["decay_sum"] = state.get("decay_sum", 0.0) + group["lr"] * group["weight_decay"]
            decay_sums.append(state["decay_sum"])
        initial = state_of(states, params, "initial", lambda p: p.detach().clone())
        sums, squares = (state_of(states, params, name, torch.zeros_like) for name in ("sum", "square_sum"))
        torch._foreach_add_(sums, grads, alpha=group["lr"])
        torch._foreach_addcmul_(squares, grads, grads)
        scale = torch._foreach_sqrt(squares)
        torch._foreach_add_(scale, [group["eps"] + decay_sum for decay_sum in decay_sums])
        change = torch._foreach_mul(initial, decay_sums)
        torch._foreach_add_(change, sums)
        if group["eps"] == 0:  # a weight without any gradient or decay so far keeps its place: the limit of eps to 0
            for each in scale:
                each.masked_fill_(each == 0, 1.0)
        torch._foreach_div_(change, scale)
        torch._foreach_copy_(params, torch._foreach_sub(initial, change))
