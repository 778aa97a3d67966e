"""LARS against its definition, step by step; its options, and its state."""

import copy
import math

import pytest
import torch
from torch import nn

from cputrain.optim import Lars, LarsVariant

pytestmark = pytest.mark.slow

STEPS = 100


class Plain:
    """LARS of one layer as defined, in float64 and without a library's optimizer."""

    def __init__(self, variant: LarsVariant, **how: float | bool) -> None:
        self.variant, self.how, self.v, self.last = variant, how, 0.0, None

    def step(self, w: torch.Tensor, g: torch.Tensor, rate: float, adapt: bool) -> torch.Tensor:
        how = self.how
        momentum, decay = how["momentum"], how["weight_decay"]
        w_norm, g_norm = float(w.norm()), float(g.norm())
        t = 1.0
        if adapt and w_norm > 0 and g_norm > 0:
            t = how["trust_coefficient"] * w_norm / (g_norm + decay * w_norm + how["eps"])
        if adapt and how["trust_clip"]:
            t = min(t / rate, 1.0)
        d = g + decay * w
        if how["momentum_correction"] and self.variant == "caffe" and self.last:
            momentum = momentum * rate / self.last
        self.last = rate
        if self.variant == "caffe":
            self.v = momentum * self.v + rate * t * d
            return w - (momentum * self.v + rate * t * d if how["nesterov"] else self.v)
        if self.variant == "timm":
            self.v = momentum * self.v + t * d
            return w - rate * (momentum * self.v + t * d if how["nesterov"] else self.v)
        self.v = momentum * self.v + d
        return w - rate * t * (momentum * self.v + d if how["nesterov"] else self.v)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", ["caffe", "timm", "nus"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"nesterov": True},
        {"trust_clip": True, "trust_coefficient": 0.5},
        {"momentum_correction": True},
        {"momentum_correction": True, "nesterov": True},
        {"eps": 0.3, "weight_decay": 0.0},
    ],
    ids=str,
)
def test_each_variant_follows_its_definition_in_100_steps(kind: torch.dtype, variant: LarsVariant, how: dict) -> None:
    options = {
        **{"momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.01, "eps": 0.0},
        **{"nesterov": False, "trust_clip": False, "momentum_correction": False, **how},
    }
    torch.manual_seed(0)
    weights = [torch.randn(4, 3, 3, 3), torch.randn(7, 5), torch.zeros(6, 2), torch.randn(5)]
    ours = [
        nn.Parameter(w.to(kind).to(memory_format=torch.channels_last) if w.ndim == 4 else w.to(kind)) for w in weights
    ]
    expected = [w.double() for w in weights]
    plain = [Plain(variant, **options) for _ in weights]
    groups = [{"params": ours[:3]}, {"params": ours[3:], "adapt": False, "weight_decay": 0.0}]
    optimizer = Lars(groups, lr=0.0, variant=variant, **options)
    for step in range(STEPS):
        rate = 0.5 * (1 + math.cos(math.pi * step / STEPS)) + 0.01
        for i, p in enumerate(ours):
            gradient = torch.randn(p.shape, dtype=torch.float64) * (0.0 if i == 1 and step % 7 == 3 else 0.1)
            p.grad = gradient.to(kind)
            if i == 3:
                plain[i].how["weight_decay"] = 0.0
            expected[i] = plain[i].step(expected[i], p.grad.double(), rate, adapt=i != 3)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    for p, exact in zip(ours, expected, strict=True):
        scale = float(exact.abs().max())
        assert float((p.detach().double() - exact).abs().max()) < scale * (2e-5 if kind == torch.float32 else 1e-12)


def test_a_layer_s_step_does_not_depend_on_its_gradient_norm() -> None:
    """|step| = rate x trust x |w| for the first step, whatever factor the loss has."""
    for factor in (1e-3, 1.0, 1e3):
        p = nn.Parameter(torch.full((10, 10), 2.0))
        p.grad = factor * torch.ones(10, 10)
        before = p.detach().clone()
        Lars([p], lr=3.0, trust_coefficient=0.001, momentum=0.9).step()
        assert float((p.detach() - before).norm()) == pytest.approx(3.0 * 0.001 * 20.0, rel=1e-5)


@pytest.mark.parametrize("variant", ["caffe", "timm", "nus"])
def test_a_restored_optimizer_continues_bit_for_bit(variant: LarsVariant) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    options = {"variant": variant, "trust_coefficient": 0.1, "weight_decay": 1e-3, "momentum_correction": True}
    optimizer = Lars(model.parameters(), lr=1.0, **options)

    def train(model: nn.Module, optimizer: Lars, first: int, last: int) -> None:
        for step in range(first, last):
            torch.manual_seed(step)
            model(torch.randn(8, 5)).square().mean().backward()
            optimizer.param_groups[0]["lr"] = 1.0 / (1 + step)
            optimizer.step()
            optimizer.zero_grad()

    train(model, optimizer, 0, 5)
    other = copy.deepcopy(model)
    resumed = Lars(other.parameters(), lr=0.0)  # the state dict carries the options
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 5, 10)
    train(other, resumed, 5, 10)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


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


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"lr": 1.0, "momentum": -0.9}, {"lr": 1.0, "variant": "lars"}], ids=str
)
def test_wrong_options_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"lr=-1.0|momentum=-0.9|must be one of caffe, timm, nus"):
        Lars([nn.Parameter(torch.ones(2))], **wrong)
