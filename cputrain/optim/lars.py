"""LARS: a learning rate for each layer, from the ratio of its weight norm to its gradient norm."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from cputrain.optim.groups import GroupOptimizer, check_not_negative, norms, state_of

LEAST_INNER = 1e-8
MOST_SCALE = 1e30
LarsVariant = Literal["caffe", "timm", "nus"]


class Lars(GroupOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, arXiv:1708.03888), in the three variants in use.

    For a layer's weights w and gradients g, d = g + weight_decay w, and the layer's trust ratio is
    t = trust_coefficient |w| / (|g| + weight_decay |w| + eps), 1 where a norm is 0. (You et al. 2018, ImageNet Training
    in Minutes, prints weight_decay |g|; |w| is meant.)

    - "caffe" (Intel Caffe, MLPerf's TensorFlow): v = momentum v + lr t d; w -= v
    - "timm": v = momentum v + t d; w -= lr v
    - "nus" (NUS, MLPerf's PyTorch by Intel): v = momentum v + d; w -= lr t v

    The variants differ only where lr or t change. It works with any model and any learning-rate scheduler::

        from cputrain.optim import Lars

        layers = [p for p in model.parameters() if p.ndim > 1]
        channels = [p for p in model.parameters() if p.ndim <= 1]  # biases and batch-norm: plain momentum SGD
        optimizer = Lars(
            [{"params": layers}, {"params": channels, "adapt": False, "weight_decay": 0.0}],
            lr=10.0, weight_decay=5e-5, trust_coefficient=0.001,
        )
        loss.backward()
        optimizer.step()

    Options are kept in `param_groups`, as torch's optimizers do: a group may have its own, and state_dict() and
    load_state_dict() carry them.

    Args:
        params: parameters, or parameter groups with options of their own; a group with adapt=False has t = 1.
        lr: learning rate; LARS needs larger ones than SGD, as t is near trust_coefficient.
        momentum: of v.
        weight_decay: L2 penalty.
        variant: one of those above.
        trust_coefficient: scale of t.
        eps: added to the denominator of t.
        nesterov: Nesterov momentum.
        trust_clip: clip t to min(t / lr, 1), so that no layer's rate exceeds lr (LARC).
        momentum_correction: with "caffe", whose v contains lr, scale v when lr changes (Goyal et al. 2017,
            arXiv:1706.02677, section 3).

    Raises:
        ValueError: if an option is negative or the variant unknown.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        variant: LarsVariant = "caffe",
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        trust_clip: bool = False,
        momentum_correction: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "variant": variant,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "trust_clip": trust_clip,
            "momentum_correction": momentum_correction,
            "adapt": True,
        }
        super().__init__(params, defaults)

    def _check(self, options: dict[str, Any]) -> None:
        check_not_negative(
            **{name: options[name] for name in ("lr", "momentum", "weight_decay", "trust_coefficient", "eps")}
        )
        if options["variant"] not in get_args(LarsVariant):
            raise ValueError(f"variant={options['variant']!r}: must be one of {', '.join(get_args(LarsVariant))}")

    def _step_group(
        self, group: dict[str, Any], states: list[dict[str, Any]], params: list[Tensor], grads: list[Tensor]
    ) -> None:
        corrected = group["momentum_correction"] and group["variant"] == "caffe"
        velocities = state_of(states, params, "momentum_buffer", torch.zeros_like)
        ratios = trust_ratios(group, params, grads)
        for state, p, g, v, t in zip(states, params, grads, velocities, ratios, strict=True):
            last_lr = state.get("last_lr")
            momentum = group["momentum"] * (group["lr"] / last_lr if corrected and last_lr else 1.0)
            state["last_lr"] = group["lr"]
            state["momentum_buffer"] = _laid_out_as(p, v)
            _update(p, _laid_out_as(p, g), state["momentum_buffer"], group, momentum, t)


def trust_ratios(group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[float]:
    """The trust ratio of each of a parameter group's layers; all norms are computed in one call."""
    if not group["adapt"] or not params:
        return [1.0] * len(params)
    coefficient, decay, eps, lr = (group[name] for name in ("trust_coefficient", "weight_decay", "eps", "lr"))
    ratios = []
    for w, g in zip(norms(params), norms(grads), strict=True):
        t = coefficient * w / (g + decay * w + eps) if w and g else 1.0
        ratios.append(min(t / lr, 1.0) if group["trust_clip"] and lr else t)
    return ratios


def _update(p: Tensor, g: Tensor, v: Tensor, group: dict[str, Any], momentum: float, t: float) -> None:
    """v = momentum v + inner d; w -= outer v, in torch's fused kernel of SGD, whose dampening is 1 - inner.

    The kernel walks through the memory of dense tensors, keeps no v without momentum, and its dampening loses the
    digits of a small `inner`, of which float64 needs all.
    """
    lr, weight_decay, nesterov = group["lr"], group["weight_decay"], group["nesterov"]
    inner, outer = {"caffe": (lr * t, 1.0), "timm": (t, lr), "nus": (1.0, lr * t)}[group["variant"]]
    exact = inner == 1.0 or (LEAST_INNER <= inner <= 1 / LEAST_INNER and p.dtype != torch.float64)
    dense = p.stride() == g.stride() == v.stride()
    if not (exact and dense and momentum) or (nesterov and inner != 1.0):  # whose Nesterov form does not dampen d
        _update_in_steps(p, g, v, group, momentum, (inner, outer))
        return
    torch._fused_sgd_(
        [p],
        [g],
        [v],
        weight_decay=weight_decay,
        momentum=momentum,
        lr=outer,
        dampening=1.0 - inner,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
    )


def _update_in_steps(
    p: Tensor, g: Tensor, v: Tensor, group: dict[str, Any], momentum: float, scales: tuple[float, float]
) -> None:
    """The same in torch's elementary operations, in float64 where float32 cannot hold a scale."""
    inner, outer = scales
    if max(inner, outer, inner * outer) > MOST_SCALE and p.dtype != torch.float64:
        wide_p, wide_v = p.double(), v.double()
        _update_in_steps(wide_p, g.double(), wide_v, group, momentum, scales)
        p.copy_(wide_p)
        v.copy_(wide_v)
        return
    d = g.add(p, alpha=group["weight_decay"])
    v.mul_(momentum).add_(d, alpha=inner)
    if group["nesterov"]:
        p.add_(v, alpha=-outer * momentum).add_(d, alpha=-outer * inner)
    else:
        p.add_(v, alpha=-outer)


def _laid_out_as(p: Tensor, other: Tensor) -> Tensor:
    """A gradient or a velocity in the parameter's memory format, which the fused kernel requires."""
    return other if other.stride() == p.stride() else torch.empty_like(p).copy_(other)
