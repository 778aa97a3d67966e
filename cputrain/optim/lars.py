"""LARS: every layer learns at a rate of its own, by what its weights are to its gradients."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from cputrain.optim.groups import GroupOptimizer

Family = Literal["caffe", "timm", "nus"]


class Lars(GroupOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, arXiv:1708.03888), in the three forms in use.

    Of a layer's weights w and gradients g: d = g + weight_decay w, and its trust ratio is
    t = trust |w| / (|g| + weight_decay |w| + epsilon), 1 where a norm is 0. (You et al. 2018, ImageNet Training in
    Minutes, prints weight_decay |g| there; |w| is meant.)

    - "caffe" (Intel Caffe, MLPerf's TensorFlow): v = momentum v + rate t d; w -= v
    - "timm": v = momentum v + t d; w -= rate v
    - "nus" (NUS, MLPerf's PyTorch by Intel): v = momentum v + d; w -= rate t v

    They differ where the rate or t change. Parameter groups with adapt=False have t = 1, as batch-norm and biases have
    in MLPerf. `clip`: t is min(t / rate, 1), so that no layer learns faster than the rate. `correct`: of "caffe", whose
    v holds the rate, v is scaled as the rate changes (Goyal et al. 2017, arXiv:1706.02677, section 3).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.0,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        family: Family = "caffe",
        trust: float = 0.001,
        epsilon: float = 0.0,
        nesterov: bool = False,
        clip: bool = False,
        correct: bool = False,
    ) -> None:
        self.family, self.trust, self.epsilon = family, trust, epsilon
        self.nesterov, self.clip, self.correct = nesterov, clip, correct
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "adapt": True, "last_lr": None}
        super().__init__(params, defaults)

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        grads = [_laid_out_as(p, g) for p, g in zip(params, grads, strict=True)]
        rate, momentum = group["lr"], group["momentum"]
        if self.correct and self.family == "caffe" and group["last_lr"]:
            momentum *= rate / group["last_lr"]
        group["last_lr"] = rate
        for p, g, t in zip(params, grads, self.trust_ratios(group, params, grads), strict=True):
            self._update(p, g, self._velocity(p), group["weight_decay"], momentum, rate, t)

    def trust_ratios(self, group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[float]:
        """Each layer's t: all norms are brought over at once."""
        if not group["adapt"] or not params:
            return [1.0] * len(params)
        norms = torch.stack(torch._foreach_norm([*params, *grads])).double().tolist()
        ratios = []
        for w, g in zip(norms[: len(params)], norms[len(params) :], strict=True):
            t = self.trust * w / (g + group["weight_decay"] * w + self.epsilon) if w and g else 1.0
            ratios.append(min(t / group["lr"], 1.0) if self.clip and group["lr"] else t)
        return ratios

    def _velocity(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        velocity: Tensor = state["momentum_buffer"]
        return velocity

    def _update(
        self, p: Tensor, g: Tensor, v: Tensor, weight_decay: float, momentum: float, rate: float, t: float
    ) -> None:
        """v = momentum v + inside d; w -= outside v, in torch's fused kernel of SGD: its dampening is 1 - inside."""
        inside, outside = {"caffe": (rate * t, 1.0), "timm": (t, rate), "nus": (1.0, rate * t)}[self.family]
        if self.nesterov and inside != 1.0:  # the kernel's Nesterov form takes d undampened
            d = g.add(p, alpha=weight_decay)
            v.mul_(momentum).add_(d, alpha=inside)
            p.add_(v, alpha=-outside * momentum).add_(d, alpha=-outside * inside)
            return
        torch._fused_sgd_(
            [p],
            [g],
            [v],
            weight_decay=weight_decay,
            momentum=momentum,
            lr=outside,
            dampening=1.0 - inside,
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=False,
        )


def _laid_out_as(p: Tensor, g: Tensor) -> Tensor:
    """The gradient in the parameter's memory format, which the fused kernel takes for granted."""
    return g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
