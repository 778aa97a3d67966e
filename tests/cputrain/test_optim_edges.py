"""LARS, LAMB and AdagradDA at the edges of their options and inputs, against their formulas in float64."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer

from cputrain.optim import AdagradDA, Lamb, Lars

pytestmark = pytest.mark.slow

Step = Callable[[dict[str, Any], dict[str, Any], Tensor, Tensor], Tensor]
"""Options, state, weights and gradients in float64 -> the new weights."""

ZERO_OR = {
    "lr": (0.0, 0.3, 4.0),
    "momentum": (0.0, 0.9),
    "weight_decay": (0.0, 0.1),
    "trust_coefficient": (0.0, 0.001, 0.5),
    "eps": (0.0, 1e-8, 0.1),
}
LARS = st.fixed_dictionaries(
    {
        **{name: st.sampled_from(values) for name, values in ZERO_OR.items()},
        "variant": st.sampled_from(["caffe", "timm", "nus"]),
        **{name: st.booleans() for name in ("nesterov", "trust_clip", "momentum_correction", "adapt")},
    }
)
RATES = {name: st.sampled_from(ZERO_OR[name]) for name in ("lr", "weight_decay")}
LAMB = st.fixed_dictionaries(
    {
        **RATES,
        "betas": st.tuples(st.sampled_from([0.0, 0.9]), st.sampled_from([0.0, 0.999])),
        "eps": st.sampled_from([0.0, 1e-6]),
        "adapt": st.booleans(),
    }
)
ADAGRAD_DA = st.fixed_dictionaries({**RATES, "eps": st.sampled_from([0.0, 1e-10, 0.1])})
WEIGHTS = st.sampled_from([0.0, 1e-3, 1.0])
GRADIENTS = st.sampled_from([0.0, 1e-25, 1e-3, 1.0, 1e25])  # the squares of two are beyond float32
MIXED = st.tuples(WEIGHTS, GRADIENTS, GRADIENTS).map(list)
SIZES = st.sampled_from([0.0, 1e-25, 1e-3, 1.0, 1e25])
KINDS = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
LAYOUTS = st.sampled_from(["plain", "scalar", "channels_last", "transposed", "strided"])


def lars(o: dict[str, Any], s: dict[str, Any], w: Tensor, g: Tensor) -> Tensor:
    w_norm, g_norm, lr, t = float(w.norm()), float(g.norm()), o["lr"], 1.0
    if o["adapt"]:
        if w_norm > 0 and g_norm > 0:
            t = o["trust_coefficient"] * w_norm / (g_norm + o["weight_decay"] * w_norm + o["eps"])
        if o["trust_clip"] and lr > 0:
            t = min(t / lr, 1.0)
    momentum, d, v = o["momentum"], g + o["weight_decay"] * w, s.get("v", torch.zeros_like(w))
    if o["momentum_correction"] and o["variant"] == "caffe" and s.get("lr"):
        momentum *= lr / s["lr"]
    inner, outer = {"caffe": (lr * t, 1.0), "timm": (t, lr), "nus": (1.0, lr * t)}[o["variant"]]
    s["lr"], s["v"] = lr, momentum * v + inner * d
    return w - outer * (momentum * s["v"] + inner * d if o["nesterov"] else s["v"])


def lamb(o: dict[str, Any], s: dict[str, Any], w: Tensor, g: Tensor) -> Tensor:
    beta1, beta2 = o["betas"]
    s["n"] = s.get("n", 0) + 1
    s["m"] = beta1 * s.get("m", 0.0) + (1 - beta1) * g
    s["v"] = beta2 * s.get("v", 0.0) + (1 - beta2) * g * g
    m, root = s["m"] / (1 - beta1 ** s["n"]), (s["v"] / (1 - beta2 ** s["n"])).sqrt() + o["eps"]
    u = torch.where(m != 0, m / root, 0.0) + o["weight_decay"] * w
    adapts = o["adapt"] and w.norm() > 0 and u.norm() > 0
    return w - o["lr"] * (float(w.norm() / u.norm()) if adapts else 1.0) * u


def adagrad_da(o: dict[str, Any], s: dict[str, Any], w: Tensor, g: Tensor) -> Tensor:
    """The minimum, coordinate by coordinate, of g w + d w^2 / 2 + H (w - first)^2 / 2."""
    first = s.setdefault("first", w.clone())
    s["g"], s["q"] = s.get("g", 0.0) + o["lr"] * g, s.get("q", 0.0) + g * g
    s["d"] = s.get("d", 0.0) + o["lr"] * o["weight_decay"]
    h = s["q"].sqrt() + o["eps"] + s["d"]
    return first - torch.where(h > 0, (s["g"] + s["d"] * first) / h, 0.0)


def made(layout: str, kind: torch.dtype, size: float, seed: int) -> Tensor:
    """Values of about a size, 0 exactly where that is 0, in a memory layout."""
    shape = {"scalar": (), "channels_last": (4, 3, 3, 3), "strided": (6, 5)}.get(layout, (5, 4))
    values = (size * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).to(kind)
    if layout == "channels_last":
        return values.to(memory_format=torch.channels_last)
    if layout == "transposed":
        return values.t()
    if layout == "strided":
        wide = torch.zeros(6, 10, dtype=kind)
        wide[:, ::2] = values
        return wide[:, ::2]
    return values


def follow(
    kind_of: type[Optimizer], step: Step, options: dict[str, Any], kind: torch.dtype, layout: str, sizes: list[float]
) -> None:
    """Six steps of one parameter beside its formula, whose weights are rounded as the parameter's are.

    The gradient is missing in the third step and laid out otherwise in the fifth; the optimizer is saved and loaded
    before the fourth, into one with other options.
    """
    shared = {name: value for name, value in options.items() if name != "adapt"}
    group = {name: value for name, value in options.items() if name == "adapt"}
    p = nn.Parameter(made(layout, kind, sizes[0], 0))
    optimizer = kind_of([{"params": [p], **group}, {"params": []}], **shared)
    start, state = p.detach().double().clone(), {}
    for n in range(6):
        if n == 3:
            loaded = kind_of([{"params": [p]}, {"params": []}], lr=1.0)
            loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer = loaded
        rate = options["lr"] * (1 - n / 8)
        optimizer.param_groups[0]["lr"] = rate
        p.grad = None if n == 2 else made(layout, kind, sizes[1 + n % 2], n + 1)
        before = p.detach().clone()
        if n == 4 and p.grad is not None:
            p.grad = p.grad.clone(memory_format=torch.contiguous_format)
        optimizer.step()
        if p.grad is None:
            assert torch.equal(p, before)
            continue
        grad, exact = p.grad.double(), {**options, "lr": rate}
        expected = step(exact, state, before.double(), grad)
        if not bool(torch.isfinite(expected).all()) or float(expected.abs().max()) > 1e6:
            return  # the formula itself diverges
        closeness = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 8e-3}[kind]
        scale = sum(float(each.abs().max()) for each in (start, expected, expected - before.double())) + 1e-36
        difference = float((p.detach().double() - expected).abs().max())
        assert difference <= closeness * scale, (n, difference, scale)


@settings(max_examples=300)
@given(options=LARS, kind=KINDS, layout=LAYOUTS, sizes=st.tuples(SIZES, SIZES, SIZES).map(list))
def test_lars_follows_its_formula_for_all_options_sizes_types_and_layouts(
    options: dict[str, Any], kind: torch.dtype, layout: str, sizes: list[float]
) -> None:
    follow(Lars, lars, options, kind, layout, sizes)


@settings(max_examples=200)
@given(options=LAMB, kind=KINDS, layout=LAYOUTS, sizes=MIXED)
def test_lamb_follows_its_formula_for_all_options_types_and_layouts(
    options: dict[str, Any], kind: torch.dtype, layout: str, sizes: list[float]
) -> None:
    follow(Lamb, lamb, options, kind, layout, sizes)


@settings(max_examples=200)
@given(options=ADAGRAD_DA, kind=KINDS, layout=LAYOUTS, sizes=MIXED)
def test_dual_averaging_follows_its_formula_for_all_options_types_and_layouts(
    options: dict[str, Any], kind: torch.dtype, layout: str, sizes: list[float]
) -> None:
    follow(AdagradDA, adagrad_da, options, kind, layout, sizes)


@pytest.mark.parametrize("kind", [Lars, Lamb, AdagradDA])
def test_a_sparse_gradient_is_refused_in_a_line_before_any_weight_changes(kind: type[Optimizer]) -> None:
    dense, table = nn.Linear(3, 3), nn.Embedding(5, 3, sparse=True)
    optimizer = kind([*dense.parameters(), *table.parameters()], lr=0.1)
    dense(table(torch.tensor([1, 2]))).sum().backward()
    before = copy.deepcopy(dense.state_dict())
    with pytest.raises(RuntimeError, match=r"(?m)^\w+ does not support the sparse gradient .* of shape \(5, 3\): .*\Z"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in dense.state_dict().items())


WRONG: list[tuple[type[Optimizer], dict[str, Any], str]] = [
    *((kind, {"lr": value}, f"lr={value}") for kind in (Lars, Lamb, AdagradDA) for value in (-1.0, math.nan, math.inf)),
    *((kind, {"weight_decay": -0.1}, "weight_decay=-0.1") for kind in (Lars, Lamb, AdagradDA)),
    *((kind, {"eps": -1e-8}, "eps=-1e-08") for kind in (Lars, Lamb, AdagradDA)),
    (Lars, {"momentum": -0.9}, "momentum=-0.9"),
    (Lars, {"trust_coefficient": math.nan}, "trust_coefficient=nan"),
    (Lars, {"variant": "mlperf"}, "must be one of caffe, timm, nus"),
    (Lamb, {"betas": (1.0, 0.999)}, "beta1=1.0"),
    (Lamb, {"betas": (0.9, 1.5)}, "beta2=1.5"),
]


@pytest.mark.parametrize(("kind", "options", "expected"), WRONG, ids=str)
def test_a_wrong_option_is_refused_at_construction_also_in_a_group_of_its_own(
    kind: type[Optimizer], options: dict[str, Any], expected: str
) -> None:
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=expected):
        kind([p], **{"lr": 0.1, **options})
    with pytest.raises(ValueError, match=expected):
        kind([{"params": [p], **options}], lr=0.1)
    optimizer = kind([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match=expected):
        optimizer.add_param_group({"params": [p], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", [Lars, Lamb, AdagradDA])
def test_parameters_of_complex_numbers_are_refused(kind: type[Optimizer]) -> None:
    with pytest.raises(ValueError, match=r"found torch\.complex64"):
        kind([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)


@pytest.mark.parametrize("kind", [Lars, Lamb, AdagradDA])
def test_parameters_of_which_ranks_have_parts_are_refused(kind: type[Optimizer]) -> None:
    """Under FSDP2: a norm of a rank's part is none of the parameter's."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        part = nn.Parameter(distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)]))
        with pytest.raises(ValueError, match="does not support sharded parameters"):
            kind([part], lr=0.1)
    finally:
        torch.distributed.destroy_process_group()


def test_lars_scales_beyond_float32_follow_the_formula() -> None:
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    p.grad = torch.full_like(p, 1e-42)  # its trust ratio is some 1e39
    before = p.detach().double()
    Lars([p], lr=10.0, momentum=0.9, weight_decay=0.0, eps=0.0, variant="nus").step()
    g = p.grad.double()
    assert torch.allclose(p.double(), before - 10.0 * 0.001 * before.norm() / g.norm() * g, rtol=1e-4)


EACH: list[tuple[type[Optimizer], dict[str, Any]]] = [
    *((Lars, {"variant": variant, "momentum_correction": True}) for variant in ("caffe", "timm", "nus")),
    (Lamb, {"weight_decay": 0.1}),
    (AdagradDA, {"weight_decay": 0.1}),
]


@pytest.mark.parametrize(("kind", "options"), EACH, ids=str)
@pytest.mark.parametrize("size", [0.1, 1e25])
def test_a_rate_that_is_a_tensor_is_the_number_in_it(
    kind: type[Optimizer], options: dict[str, Any], size: float
) -> None:
    """LARS' trust ratio of weights of 1e-25 and gradients of 1e25 is 1e-53: no tensor of float32 has room for it."""
    found = []
    for tensor in (None, torch.tensor(0.5), torch.tensor([0.5])):
        p = nn.Parameter(torch.tensor([1.0, 2.0]) / (1.0 if size < 1 else size))
        optimizer = kind([p], lr=0.5 if tensor is None else tensor, **options)
        for rate in (0.5, 0.25, 0.125):
            if tensor is None:
                optimizer.param_groups[0]["lr"] = rate
            else:
                tensor.fill_(rate)
            p.grad = torch.tensor([3.0, -1.0]) * size
            optimizer.step()
        found.append(p.detach())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    with pytest.raises(ValueError, match="lr is a tensor of 2 numbers"):
        kind([nn.Parameter(torch.ones(2))], lr=torch.ones(2), **options)


@pytest.mark.parametrize(("kind", "options"), EACH, ids=str)
@pytest.mark.parametrize("types", [(torch.float32, torch.float64), (torch.float64, torch.bfloat16)], ids=str)
def test_a_gradient_of_another_type_is_taken_in_the_weight_s(
    kind: type[Optimizer], options: dict[str, Any], types: tuple[torch.dtype, torch.dtype]
) -> None:
    found = []
    for dtype in (types[0], types[1]):
        p = nn.Parameter(torch.tensor([1.0, 2.0], dtype=types[0]))
        p.grad_dtype = None
        p.grad = torch.tensor([3.0, -1.0], dtype=dtype)
        kind([p], lr=0.5, **options).step()
        found.append(p.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize(("kind", "options"), EACH, ids=str)
def test_gradients_and_weights_that_share_memory_or_have_gaps_are_taken_by_their_values(
    kind: type[Optimizer], options: dict[str, Any]
) -> None:
    """A sum's gradient is one number expanded; a parameter may be every other column of a tensor."""
    found = []
    for expanded, gaps in ((False, False), (True, False), (True, True)):
        p = nn.Parameter(torch.ones(4, 6)[:, ::2] if gaps else torch.ones(4, 3))
        optimizer = kind([p], lr=0.5, **options)
        for _ in range(3):
            p.grad = torch.ones(()).expand(4, 3) if expanded else torch.ones(4, 3)
            optimizer.step()
        found.append(p.detach().clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert bool((found[0] < 1).all())


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_a_scheduler_may_cycle_the_momentum(kind: type[Optimizer]) -> None:
    """torch's OneCycleLR writes momentum or betas into each group, and the steps are those with these options."""
    p = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = kind([p], lr=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=6)
    options = {**optimizer.defaults, "adapt": True}
    step, state = (lars, {}) if kind is Lars else (lamb, {})
    for n in range(5):
        p.grad = torch.tensor([0.5, -1.0]) * (n + 1)
        group = {name: optimizer.param_groups[0][name] for name in ("lr", *({"momentum", "betas"} & options.keys()))}
        expected = step({**options, **group}, state, p.detach().double().clone(), p.grad.double())
        optimizer.step()
        scheduler.step()
        assert torch.allclose(p.detach().double(), expected, rtol=1e-5), n


@pytest.mark.parametrize("kind", [Lars, Lamb, AdagradDA])
def test_a_closure_gives_the_gradients_and_its_loss_and_empty_tensors_change_nothing(kind: type[Optimizer]) -> None:
    p, q, empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0, 3))

    def closure() -> Tensor:
        loss = p.square().sum() + empty.sum()
        loss.backward()
        return loss

    assert float(kind([empty, p], lr=0.1).step(closure)) == 3.0
    q.grad = torch.full_like(q, 2.0)
    assert kind([q], lr=0.1).step() is None
    assert torch.equal(p, q)


@pytest.mark.parametrize("kind", [Lars, Lamb, AdagradDA])
def test_a_loaded_state_keeps_options_that_it_lacks_and_is_refused_for_a_wrong_one(kind: type[Optimizer]) -> None:
    """As states of other versions, and of torch's optimizers."""
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = kind([p], lr=0.1, eps=0.25)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    del state["param_groups"][0]["eps"]
    optimizer.load_state_dict({**state, "param_groups": [{**state["param_groups"][0], "lr": 0.5}]})
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["eps"]) == (0.5, 0.25)
    optimizer.step()
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"lr=-1\.0"):
        optimizer.load_state_dict({**state, "param_groups": [{**state["param_groups"][0], "lr": -1.0}]})
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"] * 2})
    optimizer.load_state_dict(torch.optim.SGD([p], lr=0.1).state_dict())
    optimizer.step()
    assert bool(torch.isfinite(p).all()) and not torch.equal(p, before)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_a_constant_gradient_moves_each_weight_by_the_rate_however_small_or_large_its_square(size: float) -> None:
    """LAMB without adaptation: u = m / sqrt(v) = 1. AdagradDA: sums of n rates and of n squares, lr n / sqrt(n)."""
    grads = torch.tensor([size, -size, 1.0, 0.0])
    for kind, group, moved in ((Lamb, {"adapt": False}, 0.1 * 4), (AdagradDA, {}, 0.1 * 2)):
        p = nn.Parameter(torch.ones(4))
        optimizer = kind([{"params": [p], **group}], lr=0.1, eps=0.0)
        for n in range(4):
            p.grad = grads.clone()
            optimizer.step()
            loaded = kind([{"params": [p], **group}], lr=0.1, eps=0.0)
            loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer = loaded if n == 1 else optimizer
        expected = 1 - moved * torch.tensor([1.0, -1.0, 1.0, 0.0])
        assert torch.allclose(p, expected, rtol=1e-5), (kind, p)
        assert {value.dtype for name, value in optimizer.state[p].items() if "sq" in name} == {torch.float64}


def test_squares_of_usual_gradients_stay_float32_until_one_is_too_large() -> None:
    for kind, name in ((Lamb, "exp_avg_sq"), (AdagradDA, "square_sum")):
        p = nn.Parameter(torch.ones(2))
        optimizer = kind([p], lr=0.1)
        for size, dtype in ((1e15, torch.float32), (math.inf, torch.float32), (1e20, torch.float64)):
            p.grad = torch.full_like(p, size)
            optimizer.step()
            assert optimizer.state[p][name].dtype == dtype, (kind, size)


def test_increments_below_the_last_digit_of_bfloat16_add_up_in_the_state_also_after_loading() -> None:
    """Sums of 1,000 squares of 1: bfloat16 stops at 256, whose last digit is 2."""
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = AdagradDA([p], lr=0.0)
    for n in range(1000):
        p.grad = torch.ones_like(p)
        optimizer.step()
        if n == 500:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = AdagradDA([p], lr=0.0)
            optimizer.load_state_dict(state)
    assert optimizer.state[p]["square_sum"].tolist() == [1000.0] * 3


def test_a_layer_s_step_does_not_depend_on_its_gradient_norm() -> None:
    """|step| = rate x trust x |w| for the first step, whatever factor the loss has."""
    for factor in (1e-3, 1.0, 1e3):
        p = nn.Parameter(torch.full((10, 10), 2.0))
        p.grad = factor * torch.ones(10, 10)
        before = p.detach().clone()
        Lars([p], lr=3.0, trust_coefficient=0.001, momentum=0.9).step()
        assert float((p.detach() - before).norm()) == pytest.approx(3.0 * 0.001 * 20.0, rel=1e-5)


def test_a_parameter_group_may_have_options_of_its_own() -> None:
    """Each group steps as an optimizer of its own with those options would."""
    torch.manual_seed(2)
    weights, gradients = torch.randn(2, 6, 5), torch.randn(2, 6, 5)
    options = ({"variant": "nus", "trust_coefficient": 0.3, "momentum": 0.5}, {"nesterov": True, "weight_decay": 0.1})

    def stepped(*groups: dict, **shared: object) -> list[torch.Tensor]:
        optimizer = Lars(list(groups), lr=0.5, **shared)
        for _ in range(3):
            optimizer.step()
        return [group["params"][0].detach() for group in groups]

    def parameter(i: int) -> nn.Parameter:
        made = nn.Parameter(weights[i].clone())
        made.grad = gradients[i].clone()
        return made

    together = stepped(*({"params": [parameter(i)], **options[i]} for i in (0, 1)))
    for i in (0, 1):
        (alone,) = stepped({"params": [parameter(i)]}, **options[i])
        assert torch.equal(together[i], alone)
    assert not torch.equal(together[0], stepped({"params": [parameter(0)]})[0])
