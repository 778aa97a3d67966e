"""The optimizers of recipes, torch's and LAMB: each against its definition, step by step; the public names."""

import copy
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import cputrain.optim
from cputrain.optim import AdagradDA, Lamb, Lars, build_optimizer, layer_ratios, set_lr_and_decay
from cputrain.optim_settings import OptimizerName
from cputrain.recipe.schema import OPTIMIZERS_WITH, OptimSection
from tests.cputrain import test_optim_edges as formulas

pytestmark = pytest.mark.slow

STEPS = 100
State = dict[str, Any]
Update = Callable[[OptimSection, State, Tensor, Tensor, float, float, int], Tensor]


def sgd(_o: OptimSection, _s: State, w: Tensor, g: Tensor, rate: float, decay: float, _n: int) -> Tensor:
    return w - rate * (g + decay * w)


def momentum(o: OptimSection, s: State, w: Tensor, g: Tensor, rate: float, decay: float, _n: int) -> Tensor:
    d = g + decay * w
    s["v"] = o.momentum * s.get("v", 0.0) + d
    return w - rate * (d + o.momentum * s["v"] if o.nesterov else s["v"])


def moments(o: OptimSection, s: State, g: Tensor, n: int, epsilon: float) -> Tensor:
    s["m"] = o.beta1 * s.get("m", 0.0) + (1 - o.beta1) * g
    s["v"] = o.beta2 * s.get("v", 0.0) + (1 - o.beta2) * g * g
    return (s["m"] / (1 - o.beta1**n)) / ((s["v"] / (1 - o.beta2**n)).sqrt() + epsilon)


def adam(o: OptimSection, s: State, w: Tensor, g: Tensor, rate: float, decay: float, n: int) -> Tensor:
    return w - rate * moments(o, s, g + decay * w, n, 1e-8)


def adamw(o: OptimSection, s: State, w: Tensor, g: Tensor, rate: float, decay: float, n: int) -> Tensor:
    return w - rate * decay * w - rate * moments(o, s, g, n, 1e-8)


def lamb(o: OptimSection, s: State, w: Tensor, g: Tensor, rate: float, decay: float, _n: int) -> Tensor:
    options = {"betas": (o.beta1, o.beta2), "eps": 1e-6, "adapt": w.ndim > 1 or o.adapt_bn_and_bias}
    return formulas.lamb({"lr": rate, "weight_decay": decay, **options}, s, w, g)


def rmsprop(o: OptimSection, s: State, w: Tensor, g: Tensor, rate: float, decay: float, _n: int) -> Tensor:
    d = g + decay * w
    s["q"] = o.alpha * s.get("q", 0.0) + (1 - o.alpha) * d * d
    s["v"] = o.momentum * s.get("v", 0.0) + d / (s["q"].sqrt() + 1e-8)
    return w - rate * s["v"]


def adagrad(_o: OptimSection, s: State, w: Tensor, g: Tensor, rate: float, decay: float, _n: int) -> Tensor:
    d = g + decay * w
    s["q"] = s.get("q", 0.0) + d * d
    return w - rate * d / (s["q"].sqrt() + 1e-10)


def adadelta(o: OptimSection, s: State, w: Tensor, g: Tensor, rate: float, decay: float, _n: int) -> Tensor:
    d = g + decay * w
    s["q"] = o.rho * s.get("q", 0.0) + (1 - o.rho) * d * d
    update = d * ((s.get("u", torch.zeros_like(w)) + 1e-6).sqrt() / (s["q"] + 1e-6).sqrt())
    s["u"] = o.rho * s.get("u", 0.0) + (1 - o.rho) * update * update
    return w - rate * update


def adagrad_da(_o: OptimSection, s: State, w: Tensor, g: Tensor, rate: float, decay: float, _n: int) -> Tensor:
    return formulas.adagrad_da({"lr": rate, "weight_decay": decay, "eps": 1e-10}, s, w, g)


CASES: list[tuple[Update, dict[str, Any], float]] = [
    (sgd, {}, 0.1),
    (momentum, {}, 0.1),
    (momentum, {"nesterov": True}, 0.1),
    (adam, {}, 0.01),
    (adam, {"beta1": 0.8, "beta2": 0.95}, 0.01),
    (adamw, {"weight_decay": 0.1}, 0.01),
    (lamb, {}, 0.01),
    (lamb, {"adapt_bn_and_bias": True}, 0.01),
    (rmsprop, {"momentum": 0.5}, 0.01),
    (rmsprop, {"momentum": 0.0, "alpha": 0.9}, 0.01),
    (adagrad, {}, 0.05),
    (adadelta, {}, 1.0),
    (adadelta, {"rho": 0.95}, 0.5),
    (adagrad_da, {}, 0.05),
]


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    return layers.to(dtype=dtype, memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize(("plain", "options", "peak"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_each_follows_its_definition_over_100_steps(
    plain: Update, options: dict[str, Any], peak: float, decay_all: bool, dtype: torch.dtype
) -> None:
    """The gradients of each step, of noisy parabolas, are of the optimizer's own weights: what is compared is the
    optimizer alone."""
    optim = OptimSection(name=plain.__name__, decay_bn_and_bias=decay_all, **{"weight_decay": 0.01, **options})
    model = network(dtype)
    optimizer = build_optimizer(model, optim)
    weights = [p.detach().double() for p in model.parameters()]
    states: list[State] = [{} for _ in weights]
    for step in range(STEPS):
        rate = peak * (1 - step / STEPS)
        for i, p in enumerate(model.parameters()):
            p.grad = 0.1 * (p.detach() + torch.randn_like(p))
            decay = optim.weight_decay if decay_all or p.ndim > 1 else 0.0
            weights[i] = plain(optim, states[i], weights[i], p.grad.double(), rate, decay, step + 1)
        set_lr_and_decay(optimizer, rate, optim.weight_decay)
        optimizer.step()
    closeness = {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 2e-3, "atol": 2e-5}
    for w, p in zip(weights, model.parameters(), strict=True):
        assert torch.allclose(w, p.detach().double(), **closeness)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_a_resumed_optimizer_continues_bit_for_bit(name: str) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, stop: int) -> None:
        for step in range(first, stop):
            torch.manual_seed(100 + step)
            optimizer.zero_grad()
            model(torch.randn(4, 3, 8, 8)).square().mean().backward()
            set_lr_and_decay(optimizer, 0.01 / (step + 1), 0.01)
            optimizer.step()

    whole, broken = network(torch.float32), network(torch.float32)
    optim = OptimSection(name=name, weight_decay=0.01)
    unbroken = build_optimizer(whole, optim)
    steps(whole, unbroken, 0, 10)
    first = build_optimizer(broken, optim)
    steps(broken, first, 0, 5)
    again = network(torch.float32)
    again.load_state_dict(copy.deepcopy(broken.state_dict()))
    second = build_optimizer(again, optim)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(again, second, 5, 10)
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_dual_averaging_from_zero_at_one_rate_is_the_paper_s_closed_form() -> None:
    """Duchi et al. 2011, equation 3 with phi = weight_decay / 2 |x|^2: the gradients' plain sum, the rate outside."""
    rate, decay, w = 0.3, 0.05, torch.zeros(7, dtype=torch.float64, requires_grad=True)
    optimizer = AdagradDA([w], rate, weight_decay=decay, eps=0.1)
    grads = torch.randn(20, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for t, g in enumerate(grads, 1):
        w.grad = g.clone()
        optimizer.step()
        h = 0.1 + grads[:t].square().sum(0).sqrt()
        assert torch.allclose(w.detach(), -rate * grads[:t].sum(0) / (h + rate * t * decay), rtol=1e-12)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_weights_without_a_gradient_stay_finite_with_the_least_options(name: str) -> None:
    """Zeros wherever a recipe may have them, and otherwise the least numbers that it takes."""
    least = {"momentum": 0.0, "beta1": 0.0, "beta2": 0.0, "alpha": 0.0, "rho": 0.0, "epsilon": 0.0}
    if name in ("adam", "adamw", "rmsprop", "adagrad", "adadelta"):
        least["epsilon"] = 1.2e-38
    optim = OptimSection(
        name=name, weight_decay=0.0, **{key: value for key, value in least.items() if name in OPTIMIZERS_WITH[key]}
    )
    model = network(torch.float32)
    optimizer = build_optimizer(model, optim)
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(2):
        set_lr_and_decay(optimizer, 0.1, 0.0)
        optimizer.step()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_frozen_parameters_are_skipped_and_weight_decay_applies_to_decaying_groups_only() -> None:
    model = network(torch.float32)
    model[0].requires_grad_(False)
    optimizer = build_optimizer(model, OptimSection(decay_bn_and_bias=False))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]
    set_lr_and_decay(optimizer, 0.5, 0.25)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.25), (0.5, 0.0)]


def test_layer_ratios_are_ratios_of_norms() -> None:
    model = network(torch.float32)
    optimizer = build_optimizer(model, OptimSection(name="lars", weight_decay=0.1))
    set_lr_and_decay(optimizer, 1.0, 0.1)
    model(torch.randn(8, 3, 8, 8)).square().mean().backward()
    rows = layer_ratios(model, optimizer)
    assert [row["layer"] for row in rows] == [name for name, _ in model.named_parameters()]
    w, g = float(model[4].weight.norm()), float(model[4].weight.grad.norm())
    row = next(row for row in rows if row["layer"] == "4.weight")
    assert row == {
        "layer": "4.weight",
        "weights": pytest.approx(w),
        "gradients": pytest.approx(g),
        "ratio": pytest.approx(w / g),
        "trust": pytest.approx(0.001 * w / (g + 0.1 * w)),
    }
    assert next(row for row in rows if row["layer"] == "4.bias")["trust"] == 1.0
    model.zero_grad()
    model(torch.randn(8, 3, 8, 8)).mul(0).sum().backward()
    assert {row["ratio"] for row in layer_ratios(model, build_optimizer(model, OptimSection()))} == {None}


def test_layer_ratios_of_bfloat16_weights_are_those_of_the_update() -> None:
    """1,000 ones have the norm 31.623, in bfloat16 31.625."""
    p = nn.Linear(1000, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        p.weight.fill_(1.0)
    p.weight.grad = torch.full_like(p.weight, 0.25)
    (row,) = layer_ratios(p, Lars(p.parameters(), lr=1.0, trust_coefficient=0.5, eps=1.0))
    norm = 1000**0.5
    assert row["trust"] == pytest.approx(0.5 * norm / (0.25 * norm + 1.0), rel=1e-6)
    assert row["weights"] == pytest.approx(norm, rel=1e-6)


def test_every_option_of_the_schema_says_whom_it_serves() -> None:
    always = {"name", "scale_rate_by", "weight_decay", "decay_bn_and_bias", "clip_norm"}
    assert OPTIMIZERS_WITH.keys() | always == OptimSection.model_fields.keys()


def test_the_public_optimizers_keep_their_names() -> None:
    assert {"AdagradDA", "Lamb", "Lars"} <= set(cputrain.optim.__all__)
    weight = nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.ones(3, 2)
    for optimizer in (Lars([weight], lr=0.1), Lamb([weight], lr=0.1), AdagradDA([weight], lr=0.1)):
        optimizer.step()
        copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict())


def test_lamb_and_adagrad_da_carry_their_options_in_their_state() -> None:
    torch.manual_seed(0)
    for kind, options in ((Lamb, {"betas": (0.8, 0.9), "eps": 0.01}), (AdagradDA, {"eps": 0.5})):
        model, gradient = nn.Linear(3, 2, bias=False), torch.randn(2, 3)
        optimizer = kind(model.parameters(), lr=0.1, **options)
        model.weight.grad = gradient
        optimizer.step()
        other = copy.deepcopy(model)
        resumed = kind(other.parameters(), lr=0.0)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other.weight.grad = gradient.clone()
        for each in (optimizer, resumed):
            each.step()
        assert torch.equal(model.weight, other.weight)


OPTIONS: list[State] = [
    *({"name": name} for name in get_args(OptimizerName)),
    {"name": "momentum", "momentum": 0.0},
    {"name": "lars", "momentum": 0.0},
    {"name": "rmsprop", "momentum": 0.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_what_an_optimizer_keeps_is_counted(options: State) -> None:
    """In tensors of a weight's size, as the room for a checkpoint and the memory of a plan are."""
    network, optim = nn.Linear(3, 5, bias=False), OptimSection(**options)
    optimizer = build_optimizer(network, optim)
    set_lr_and_decay(optimizer, 0.1, 0.0)
    network(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    kept = [value for value in optimizer.state[network.weight].values() if isinstance(value, Tensor)]
    assert optim.state_copies == sum(value.numel() == 15 for value in kept)
