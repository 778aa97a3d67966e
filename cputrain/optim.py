"""Optimizers LARS (You et al. 2017), LAMB (You et al. 2020) and dual-averaging AdaGrad (Duchi et al. 2011); an
optimizer by its name, one of these or torch's; and each layer's norms and trust ratio.

Lars, Lamb, AdagradDA and param_groups work with any model: `from cputrain.optim import Lars`. Lars and Lamb are for
large batches.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Optimizer, RMSprop

from cputrain.kernels.split_layers import CHECKED_SIZES, LambOptions, LayerSteps, layer_steps, random_weight
from cputrain.kernels.split_optimizers import SplitSteps
from cputrain.kernels.split_weights import SplitParameter
from cputrain.optim_settings import OptimSettings

__all__ = [
    "OPTIMIZERS",
    "AdagradDA",
    "Lamb",
    "Lars",
    "LarsVariant",
    "build_optimizer",
    "layer_ratios",
    "param_groups",
    "set_lr_and_decay",
]

FEW_DIGITS = (torch.bfloat16, torch.float16)
# Norms of float32 tensors outside this range may have lost squares to underflow or overflow.
SAFE_NORMS = (1e-12, 1e18)
# Squares of float32 gradients are stored in float64 in two cases: if eps, which is added to their root, is too small to
# hide rounding (the smallest square with full precision has the root 1e-19), and from a gradient of this norm on, as
# float32 holds the sum of at most a million such squares.
MIN_ADDED, MAX_SQUARED = 1e-16, 1e16
MIN_INNER = 1e-8  # factor of a LARS update whose rounding in float32 is harmless
MAX_SCALE = 1e30  # float32 can represent it and its inverse, also times a value
LarsVariant = Literal["caffe", "timm", "nus"]
ParamGroups = list[dict[str, Any]]
CACHED_WEIGHTS = 1 << 19  # split weights that are updated together: 4 MiB in float32, with their gradients


class GroupOptimizer(Optimizer):
    """Optimizer that updates the parameters with gradients, group by group.

    bfloat16 and float16 parameters are updated in float32 and have float32 state, so that increments smaller than their
    last digit accumulate; split weights (`cputrain.optimize(..., master_weights="split")`) are updated exactly. Squares
    that float32 cannot represent are float64.
    """

    updates_split_weights = True
    split_steps: SplitSteps

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        Raises ValueError, without adding the group, for a wrong option, a parameter that is not floating-point, or one
        that is sharded over ranks (FSDP2), because the norm of a shard is not the parameter's.
        """
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        if any(hasattr(p, "placements") for p in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise ValueError(
                f"{type(self).__name__} does not support sharded parameters (DTensor): use DistributedDataParallel"
            )
        wrong = [p.dtype for p in self.param_groups[-1]["params"] if not p.is_floating_point()]
        if wrong:
            self.param_groups.pop()
            raise ValueError(f"{type(self).__name__} supports only floating-point parameters, found {wrong[0]}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients; return the closure's loss, None without a closure.

        Raises RuntimeError for a sparse gradient, before any parameter is updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        for p in chain.from_iterable(trained):
            if p.grad.layout != torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} does not support the sparse gradient of a parameter of shape "
                    f"{tuple(p.shape)}: use torch.nn.Embedding(sparse=False), or torch.optim.SparseAdam for it"
                )
        for group, with_gradient in zip(self.param_groups, trained, strict=True):
            options = {**group, "lr": float(group["lr"])}  # a float32 tensor times a trust ratio may underflow
            splits = [p for p in with_gradient if isinstance(p, SplitParameter)]
            if splits:
                self._step_splits(options, [self.state[p] for p in splits], splits)
            params = [p for p in with_gradient if not isinstance(p, SplitParameter)]
            if params:
                wide = [widened(p) for p in params]
                grads = [p.grad.to(w.dtype) for p, w in zip(params, wide, strict=True)]
                self._step_group(options, [self.state[p] for p in params], wide, grads)
                for p, updated in zip(params, wide, strict=True):
                    if updated is not p:
                        p.copy_(updated)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, keeping a type with more precision than the parameter's; torch would round it.

        Options missing in the state keep their values. Raises ValueError for a wrong option, without loading anything.
        """
        loaded = state_dict["param_groups"]
        if len(loaded) == len(self.param_groups):  # else torch raises an error
            loaded = [{**group, **options} for group, options in zip(self.param_groups, loaded, strict=True)]
        for options in loaded:
            self._check({**self.defaults, **options})
        super().load_state_dict({**state_dict, "param_groups": loaded})
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, p in zip(numbers, params, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and (p.dtype in FEW_DIGITS or value.dtype == torch.float64 != p.dtype):
                    kind = torch.promote_types(value.dtype, torch.float32)
                    self.state[p][name] = value.detach().to(kind, copy=True)

    @abstractmethod
    def _check(self, options: dict[str, Any]) -> None:
        """Raise ValueError for an invalid option of a group."""

    @abstractmethod
    def _step_group(
        self, group: dict[str, Any], states: list[dict[str, Any]], params: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Update the parameters of a group that have gradients; there is at least one."""

    def _step_splits(
        self, group: dict[str, Any], states: list[dict[str, Any]], weights: Sequence[SplitParameter]
    ) -> None:
        """Update the split weights of a group by their float32 values, as many at once as stay in the cache."""
        for batch in _in_batches(list(zip(states, weights, strict=True))):
            splits = [weight for _, weight in batch]
            wide, grads = self.split_steps.read(splits)
            self._step_group(group, [state for state, _ in batch], wide, grads)
            self.split_steps.write(splits, wide)


Pair = tuple[dict[str, Any], SplitParameter]  # a weight with its state


def _in_batches(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Yield weights whose float32 values stay in the cache together; a larger one is alone."""
    batch: list[Pair] = []
    for pair in pairs:
        if batch and sum(p.numel() for _, p in batch) + pair[1].numel() > CACHED_WEIGHTS:
            yield batch
            batch = []
        batch.append(pair)
    if batch:
        yield batch


def state_of(
    states: Sequence[dict[str, Any]], params: Sequence[Tensor], name: str, initial: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Return the state tensor `name` of each parameter, created by `initial` at the parameter's first step."""
    for state, p in zip(states, params, strict=True):
        if name not in state:
            state[name] = initial(p)
    return [state[name] for state in states]


def squares_of(states: Sequence[dict[str, Any]], grads: Sequence[Tensor], name: str, eps: float) -> list[Tensor]:
    """Return the state tensor `name` of each parameter for squared gradients, in a type that can represent them."""
    squares = state_of(states, grads, name, torch.zeros_like)
    for state, square, norm in zip(states, squares, norms(grads), strict=True):
        if eps < MIN_ADDED or MAX_SQUARED < norm < math.inf:
            state[name] = square.double()
    return [state[name] for state in states]


def root_plus(squares: list[Tensor], added: Sequence[float], eps: float) -> list[Tensor]:
    """Return sqrt(squares) + added, to divide by: with `eps` 0, 1 in place of 0."""
    made = list(torch._foreach_sqrt(squares))
    torch._foreach_add_(made, added)
    if eps == 0:
        for each in made:
            each.masked_fill_(each == 0, 1.0)
    return made


def norms(tensors: Sequence[Tensor]) -> list[float]:
    """Return the Euclidean norm of each tensor, even if float32 cannot represent the squares."""
    found = torch.stack([norm.double() for norm in torch._foreach_norm(list(tensors))]).tolist()
    return [
        norm if _is_safe(norm) else float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
        for tensor, norm in zip(tensors, found, strict=True)
    ]


def _is_safe(norm: float) -> bool:
    return SAFE_NORMS[0] <= norm <= SAFE_NORMS[1]


def _float32_zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.float32)


def check_not_negative(**options: float) -> None:
    """Raise ValueError for an option that is negative or not finite."""
    for name, value in options.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} is a tensor of {value.numel()} numbers: it must have exactly one")
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value} must be finite and at least 0")


def check_below_one(**options: float) -> None:
    """Raise ValueError for an option that is not in [0, 1)."""
    for name, value in options.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be at least 0 and less than 1")


def widened(tensor: Tensor) -> Tensor:
    """Return a bfloat16 or float16 tensor, or a split weight, in float32, any other unchanged."""
    if isinstance(tensor, SplitParameter):
        return tensor.joined()
    return tensor.float() if tensor.dtype in FEW_DIGITS else tensor


class Lars(GroupOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, arXiv:1708.03888), in three variants.

    With a layer's weights w and gradients g, d = g + weight_decay w, and the layer's trust ratio is
    t = trust_coefficient |w| / (|g| + weight_decay |w| + eps), or 1 if a norm is 0. (You et al. 2018, ImageNet Training
    in Minutes, prints weight_decay |g| by mistake for |w|.)

    - "caffe" (Intel Caffe, MLPerf's TensorFlow): v = momentum v + lr t d; w -= v
    - "timm": v = momentum v + t d; w -= lr v
    - "nus" (NUS, MLPerf's PyTorch by Intel): v = momentum v + d; w -= lr t v

    The variants differ only if lr or t change. Lars works with any model and any learning-rate scheduler::

        from cputrain.optim import Lars

        layers = [p for p in model.parameters() if p.ndim > 1]
        channels = [p for p in model.parameters() if p.ndim <= 1]  # biases and batch-norm: plain momentum SGD
        optimizer = Lars(
            [{"params": layers}, {"params": channels, "adapt": False, "weight_decay": 0.0}],
            lr=10.0, weight_decay=5e-5, trust_coefficient=0.001,
        )
        loss.backward()
        optimizer.step()

    Options are stored in `param_groups`, as in torch's optimizers: each group may override them, and state_dict() and
    load_state_dict() include them.

    Args:
        params: parameters, or parameter groups that may override options; a group with adapt=False has t = 1.
        lr: learning rate; LARS needs larger ones than SGD, as t is near trust_coefficient.
        momentum: decay of v.
        weight_decay: L2 penalty.
        variant: "caffe", "timm" or "nus", as above.
        trust_coefficient: scale of t.
        eps: added to the denominator of t.
        nesterov: Nesterov momentum.
        trust_clip: clip t to min(t / lr, 1), so that no layer's learning rate exceeds lr (LARC).
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
            raise ValueError(f"variant={options['variant']!r} must be one of {', '.join(get_args(LarsVariant))}")

    def _step_group(
        self, group: dict[str, Any], states: list[dict[str, Any]], params: list[Tensor], grads: list[Tensor]
    ) -> None:
        velocities = state_of(states, params, "momentum_buffer", torch.zeros_like)
        ratios = trust_ratios(group, params, grads)
        for state, p, g, v, t in zip(states, params, grads, velocities, ratios, strict=True):
            momentum = _momentum(group, state)
            state["momentum_buffer"] = _laid_out_as(p, v)
            _update(p, _laid_out_as(p, g), state["momentum_buffer"], group, momentum, t)

    def _step_splits(
        self, group: dict[str, Any], states: list[dict[str, Any]], weights: Sequence[SplitParameter]
    ) -> None:
        """Update split weights in two passes over memory, norms and SGD's, where these have the same bits."""
        layers = layer_steps(self.split_steps)
        if not (self.split_steps.direct and layers.way):
            super()._step_splits(group, states, weights)
            return
        others: list[Pair] = []
        sizes = layers.norms(weights) if group["adapt"] else [None] * len(weights)
        for state, weight, size in zip(states, weights, sizes, strict=True):
            inner, outer = _scales(group, trust_ratio(group, *size) if size else 1.0)
            if not (size is None or all(map(_is_safe, size))) or not _is_fused(group, inner, outer):
                others.append((state, weight))
                continue
            momentum = _momentum(group, state)
            state_of([state], [weight.data], "momentum_buffer", _float32_zeros)
            options = {"lr": outer, "momentum": momentum, "dampening": 1.0 - inner, "maximize": False}
            self.split_steps.sgd({**group, **options}, [weight], [state])
        if others:
            super()._step_splits(group, [state for state, _ in others], [weight for _, weight in others])


def _momentum(group: dict[str, Any], state: dict[str, Any]) -> float:
    """Return a weight's momentum, corrected for a change of the rate if requested; note the rate in its state."""
    last_lr, state["last_lr"] = state.get("last_lr"), group["lr"]
    corrected = group["momentum_correction"] and group["variant"] == "caffe" and last_lr
    return float(group["momentum"] * (group["lr"] / last_lr if corrected else 1.0))


def trust_ratios(group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[float]:
    """Return the trust ratio of each layer of a parameter group; all norms are computed in one call."""
    if not group["adapt"] or not params:
        return [1.0] * len(params)
    return [trust_ratio(group, w, g) for w, g in zip(norms(params), norms(grads), strict=True)]


def trust_ratio(group: dict[str, Any], w: float, g: float) -> float:
    """Return the trust ratio of a layer, by the norms of its weights and gradients."""
    coefficient, decay, eps, lr = (group[name] for name in ("trust_coefficient", "weight_decay", "eps", "lr"))
    t = coefficient * w / (g + decay * w + eps) if w and g else 1.0
    return float(min(t / lr, 1.0) if group["trust_clip"] and lr else t)


def _scales(group: dict[str, Any], t: float) -> tuple[float, float]:
    """Return inner and outer of v = momentum v + inner d; w -= outer v."""
    lr = group["lr"]
    return {"caffe": (lr * t, 1.0), "timm": (t, lr), "nus": (1.0, lr * t)}[group["variant"]]


def _is_fused(group: dict[str, Any], inner: float, outer: float, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether torch's fused SGD kernel, whose dampening is 1 - inner, computes an update.

    It stores no v without momentum, its Nesterov form does not dampen d, and its dampening rounds a small `inner`,
    which matters most in float64.
    """
    exact = inner == 1.0 or (MIN_INNER <= inner <= 1 / MIN_INNER and dtype != torch.float64)
    return bool(group["momentum"] and exact and _holds(outer) and (inner == 1.0 or not group["nesterov"]))


def _update(p: Tensor, g: Tensor, v: Tensor, group: dict[str, Any], momentum: float, t: float) -> None:
    """Compute v = momentum v + inner d; w -= outer v, with torch's fused SGD kernel, which needs dense tensors of equal
    layout, else with elementary operations."""
    inner, outer = _scales(group, t)
    dense = p.stride() == g.stride() == v.stride()
    if not (dense and momentum and _is_fused(group, inner, outer, p.dtype)):
        _update_in_steps(p, g, v, group, momentum, (inner, outer))
        return
    torch._fused_sgd_(
        [p],
        [g],
        [v],
        weight_decay=group["weight_decay"],
        momentum=momentum,
        lr=outer,
        dampening=1.0 - inner,
        nesterov=group["nesterov"],
        maximize=False,
        is_first_step=False,
    )


def _update_in_steps(
    p: Tensor, g: Tensor, v: Tensor, group: dict[str, Any], momentum: float, scales: tuple[float, float]
) -> None:
    """Do the same with torch's elementary operations, in float64 if float32 cannot represent a scale."""
    inner, outer = scales
    if not all(map(_holds, (inner, outer, inner * outer))) and p.dtype != torch.float64:
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


def _holds(scale: float) -> bool:
    """Whether float32 can represent a scale and the scaled values."""
    return scale == 0 or 1 / MAX_SCALE <= scale <= MAX_SCALE


def _laid_out_as(p: Tensor, other: Tensor) -> Tensor:
    """Return a gradient or velocity in the parameter's memory format, which the fused kernel requires."""
    return other if other.stride() == p.stride() else torch.empty_like(p).copy_(other)


class Lamb(GroupOptimizer):
    """Layer-wise adaptive moments (You et al. 2020, arXiv:1904.00962, Algorithm 2), phi(z) = z.

    With Adam's bias-corrected averages m of the gradients and v of their squares, u = m / (sqrt(v) + eps)
    + weight_decay w, and w -= lr t u with the trust ratio t = |w| / |u|, or 1 if a norm is 0.

    Options are stored in `param_groups`, as in torch's optimizers; each group may override them, e.g. with
    {"params": ..., "adapt": False} for biases and batch-norm, which sets t = 1.

    Args:
        params: parameters, or parameter groups that may override options.
        lr: learning rate.
        betas: decay rates of the averages m and v.
        weight_decay: decoupled weight decay.
        eps: added to the square root of v.

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
        for state in states:  # per parameter, as some may have had no gradient
            state["step"] = state.get("step", 0) + 1
        steps = [state["step"] for state in states]
        beta1, beta2 = group["betas"]
        averages = state_of(states, params, "exp_avg", torch.zeros_like)
        squares = squares_of(states, grads, "exp_avg_sq", group["eps"])
        torch._foreach_lerp_(averages, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        # Both corrections at once: (m / a) / (sqrt(v / b) + eps) = sqrt(b) / a * m / (sqrt(v) + eps sqrt(b))
        roots = [math.sqrt(1 - beta2**step) for step in steps]
        # With eps 0, an element without any gradient so far follows only its weight decay.
        scale = root_plus(squares, [group["eps"] * root for root in roots], group["eps"])
        updates = torch._foreach_div(averages, scale)
        torch._foreach_mul_(updates, [root / (1 - beta1**step) for root, step in zip(roots, steps, strict=True)])
        torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        if group["adapt"]:
            most = [torch.finfo(update.dtype).max for update in updates]
            sizes = zip(norms(params), norms(updates), most, strict=True)
            torch._foreach_mul_(updates, [min(w / u, limit) if w and u else 1.0 for w, u, limit in sizes])
        torch._foreach_add_(params, updates, alpha=-group["lr"])

    def _step_splits(
        self, group: dict[str, Any], states: list[dict[str, Any]], weights: Sequence[SplitParameter]
    ) -> None:
        """Update split weights in two passes over memory, averages with norms and update, where these have the same
        bits, and a third one over gradients, whose squares may need float64."""
        layers, beta1 = layer_steps(self.split_steps), group["betas"][0]
        native = self.split_steps.direct and layers.way and 1 - beta1 < 0.5 and group["eps"] >= MIN_ADDED
        if not (native and _native_lamb_is_exact(layers, self.split_steps)):
            super()._step_splits(group, states, weights)
            return
        pairs: list[Pair] = []
        others: list[Pair] = []
        for state, weight, (_, g) in zip(states, weights, layers.norms(weights, of_weights=False), strict=True):
            square = state.get("exp_avg_sq")
            is_wide = g > MAX_SQUARED or (square is not None and square.dtype == torch.float64)
            (others if is_wide else pairs).append((state, weight))
        if pairs:
            _native_lamb(layers, group, [state for state, _ in pairs], [weight for _, weight in pairs])
        if others:
            super()._step_splits(group, [state for state, _ in others], [weight for _, weight in others])


def _native_lamb(
    layers: LayerSteps, group: dict[str, Any], states: list[dict[str, Any]], weights: Sequence[SplitParameter]
) -> None:
    """Update split weights as Lamb's `_step_group` does."""
    beta1, beta2 = group["betas"]
    options = []
    for state in states:
        step = state["step"] = state.get("step", 0) + 1
        root = math.sqrt(1 - beta2**step)
        options.append(
            LambOptions(
                lerp=1 - beta1,
                beta2=beta2,
                square=1 - beta2,
                added=group["eps"] * root,
                correction=root / (1 - beta1**step),
                decay=group["weight_decay"],
                ratio=1.0,
                rate=-group["lr"],
            )
        )
    sizes = layers.lamb_averages(weights, states, options)
    for state, weight, each, size in zip(states, weights, options, sizes, strict=True) if group["adapt"] else ():
        w, u = size if all(map(_is_safe, size)) else _wide_lamb_norms(state, weight, each)
        each.ratio = min(w / u, torch.finfo(torch.float32).max) if w and u else 1.0
    layers.lamb_update(weights, states, options)


def _wide_lamb_norms(state: dict[str, Any], weight: SplitParameter, options: LambOptions) -> list[float]:
    """Return the norms of a weight and of its update, even if float32 cannot represent the squares."""
    value = weight.joined()
    update = state["exp_avg"].div(state["exp_avg_sq"].sqrt().add_(options.added)).mul_(options.correction)
    return norms([value, update.add_(value, alpha=options.decay)])


@cache
def _native_lamb_is_exact(layers: LayerSteps, steps: SplitSteps) -> bool:
    """Return whether the native steps have the bits of torch's operators on this CPU."""
    found = []
    for native in (False, True):
        weight = random_weight(CHECKED_SIZES[-1])
        optimizer = Lamb([weight], lr=0.01, weight_decay=0.01)
        optimizer.split_steps = steps
        group, states = optimizer.param_groups[0], [optimizer.state[weight]]
        for _ in range(3):
            if native:
                _native_lamb(layers, group, states, [weight])
            else:
                GroupOptimizer._step_splits(optimizer, group, states, [weight])
        found.append(torch.cat([weight.joined(), states[0]["exp_avg"], states[0]["exp_avg_sq"]]))
    return torch.equal(*found)


class AdagradDA(GroupOptimizer):
    """Adagrad's primal-dual subgradient update (Duchi, Hazan, Singer 2011, JMLR 12, equation 3), psi centered at w_0.

    After step t, with learning rate r, gradient g and weight decay d of each step, and
    H = eps + sqrt(sum of g^2), the weights minimize

        sum of r (<g, w> + d / 2 |w|^2) + 1/2 <w - w_0, H (w - w_0)>,

    which is w = w_0 - (sum of r g + (sum of r d) w_0) / (H + sum of r d). The paper has constant r and w_0 = 0. Here
    each step's gradient is weighted by that step's learning rate, so that a schedule that ends at 0 does not return the
    weights to w_0. TensorFlow 1's AdagradDA always uses w_0 = 0, which sets a network's weights to zero.

    Args:
        params: parameters, or parameter groups that may override options.
        lr: learning rate.
        weight_decay: L2 penalty d.
        eps: added to the square root of the summed squares.

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
        sums = state_of(states, params, "sum", torch.zeros_like)
        squares = squares_of(states, grads, "square_sum", group["eps"])
        torch._foreach_add_(sums, grads, alpha=group["lr"])
        torch._foreach_addcmul_(squares, grads, grads)
        # With eps 0, a weight without gradient or decay so far stays unchanged, as for eps -> 0.
        scale = root_plus(squares, [group["eps"] + decay_sum for decay_sum in decay_sums], group["eps"])
        change = torch._foreach_mul(initial, decay_sums)
        torch._foreach_add_(change, sums)
        change = torch._foreach_div(change, scale)
        torch._foreach_copy_(params, torch._foreach_sub(initial, change))


def param_groups(
    *modules: nn.Module, weight_decay: float, decay_bn_and_bias: bool = False, adapt_bn_and_bias: bool = False
) -> list[dict[str, Any]]:
    """Return the parameters of networks (and losses) that require gradients as two groups, for any optimizer.

    The second has biases and batch-norm's parameters, with those that a network's no_weight_decay() names: in timm's
    networks position embeddings and class tokens. Its weight_decay is 0 unless decay_bn_and_bias is True, and Lars and
    Lamb adapt its rates only if adapt_bn_and_bias is True. A parameter of several modules stands once.
    Source: MLPerf's reference of ResNet-50, whose LARS leaves these parameters out.
    """
    apart: dict[Tensor, bool] = {}
    for module in modules:
        exempt: Callable[[], Iterable[str]] | None = getattr(module, "no_weight_decay", None)
        names = set(exempt()) if callable(exempt) else set()
        for name, p in module.named_parameters():
            if p.requires_grad:
                apart.setdefault(p, p.ndim <= 1 or name in names)
    return [
        {"params": [p for p, is_apart in apart.items() if not is_apart], "weight_decay": weight_decay},
        {
            "params": [p for p, is_apart in apart.items() if is_apart],
            "weight_decay": weight_decay if decay_bn_and_bias else 0.0,
            "adapt": adapt_bn_and_bias,
        },
    ]


def build_optimizer(model: nn.Module, optim: OptimSettings, loss: nn.Module | None = None) -> Optimizer:
    """Build the optimizer of all parameters that require gradients, those of a loss included, with lr=0: the rate is
    set before each step."""
    modules = (model,) if loss is None else (model, loss)
    groups = param_groups(
        *modules,
        weight_decay=optim.weight_decay,
        decay_bn_and_bias=optim.decay_bn_and_bias,
        adapt_bn_and_bias=optim.adapt_bn_and_bias,
    )
    for group, decays in zip(groups, (True, optim.decay_bn_and_bias), strict=True):
        group["decays"] = decays
    optimizer = OPTIMIZERS[optim.name](groups, optim)
    set_lr_and_decay(optimizer, 0.0, optim.weight_decay)
    return optimizer


def set_lr_and_decay(optimizer: Optimizer, lr: float, weight_decay: float) -> None:
    """Set the learning rate of all parameter groups, and the weight decay of the groups that decay."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


def _lars(groups: ParamGroups, optim: OptimSettings) -> Optimizer:
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


def _eps(optim: OptimSettings) -> dict[str, Any]:
    return {} if optim.epsilon == "auto" else {"eps": optim.epsilon}


def _adam(groups: ParamGroups, optim: OptimSettings) -> dict[str, Any]:
    return {"params": groups, "lr": 0.0, "betas": (optim.beta1, optim.beta2), **_eps(optim)}


# torch's optimizers use the fused implementation if there is one for CPUs, as it passes over the weights only once.
OPTIMIZERS: dict[str, Callable[[ParamGroups, OptimSettings], Optimizer]] = {
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
    """Return |w|, |g|, |w| / |g| and LARS's trust ratio of each parameter with a gradient, in the model's order.

    Call this before the update. See You et al. 2018, Table 3. `ratio` is None if |g| is 0, `trust` if the optimizer is
    not LARS.
    """
    named = {p: name for name, p in model.named_parameters() if p.grad is not None}
    trust: dict[Any, float] = {}
    if isinstance(optimizer, Lars):
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            wide = [widened(p) for p in params], [widened(p.grad) for p in params]
            trust |= dict(zip(params, trust_ratios(group, *wide), strict=True))
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
