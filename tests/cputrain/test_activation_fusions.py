"""torchvision's networks with ReLU6, Hardswish or SiLU after batch-norm: trained, restored and copied as with torch."""

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import cputrain
from cputrain.models.vision import import_torchvision

pytestmark = pytest.mark.slow

STEPS = 3
CLASSES = 5


class Functional(nn.Module):
    """Functional SiLU after batch-norm, alone and after the addition of the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x):
        out = functional.silu(self.bn1(self.conv1(x)))
        out = functional.silu(self.bn2(self.conv2(out)) + out)
        return self.fc(out.mean((2, 3)))


def of_torchvision(name: str, **options: Any) -> nn.Module:
    network: nn.Module = getattr(import_torchvision("models"), name)(weights=None, num_classes=CLASSES, **options)
    return network


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {  # how it is built, and an activation that is fused
    "functional SiLU": (Functional, "SiLU"),
    "mobilenet_v2": (partial(of_torchvision, "mobilenet_v2", dropout=0.0), "ReLU6"),
    "mobilenet_v3_small": (partial(of_torchvision, "mobilenet_v3_small", dropout=0.0), "Hardswish"),
    "efficientnet_b0": (partial(of_torchvision, "efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0), "SiLU"),
    "regnet_y_400mf": (partial(of_torchvision, "regnet_y_400mf"), "ReLU"),
}
# The last one's layers are in the others.
COSTLY = {"mobilenet_v2": (pytest.mark.long,), "efficientnet_b0": (pytest.mark.long, pytest.mark.nightly)}


def built(kind: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    network = kind()
    return network, torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9)


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(2)).to(dtype)


def loss_of(network: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    return functional.cross_entropy(network(batch(dtype)), torch.arange(4))


def trained(network: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
    """Train for some steps; return their losses, and the gradients of the first step."""
    losses, gradients = [], torch.empty(0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(network)
        loss.backward()
        if not step:
            gradients = gradients_of(network)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), gradients


def gradients_of(network: nn.Module) -> Tensor:
    return torch.cat([value.grad.flatten() for value in network.parameters() if value.grad is not None])


def off(values: Tensor, expected: Tensor) -> float:
    return float((values - expected).double().norm() / expected.double().norm())


@pytest.mark.parametrize("name", [pytest.param(name, marks=COSTLY.get(name, ())) for name in NETWORKS])
def test_a_network_trains_as_with_torch_s_layers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind, activation = NETWORKS[name]
    (plain, plain_optimizer), (network, optimizer) = built(kind), built(kind)
    exact = copy.deepcopy(plain).double()
    loss_of(exact, torch.float64).backward()
    classes, keys = [type(module) for module in network.modules()], list(network.state_dict())
    cputrain.optimize(network, optimizer, sample_input=batch())
    cputrain.explain(network)
    assert re.search(
        rf"fused forward, \d+ layers? \(\d+ batch-norms? with {activation} in one pass\)", capsys.readouterr().out
    )
    losses, gradients = trained(network, optimizer)
    expected, plain_gradients = trained(plain, plain_optimizer)
    assert off(losses[0], expected[0]) < 1e-5 and off(losses, expected) < 1e-2
    # Rounding decides on which side of a bend values are, for torch's layers, too.
    assert off(gradients, gradients_of(exact)) < 1e-4 + 3 * off(plain_gradients, gradients_of(exact))
    assert list(network.state_dict()) == keys
    plain.load_state_dict(network.state_dict())
    network.load_state_dict(plain.state_dict())
    network.eval()
    plain.eval()
    with torch.no_grad():
        outputs = network(batch())
        assert off(outputs, plain(batch())) < 1e-4
        assert torch.equal(copy.deepcopy(network)(batch()), outputs)
        assert torch.equal(pickle.loads(pickle.dumps(network))(batch()), outputs)
    cputrain.restore(network)
    assert [type(module) for module in network.modules()] == classes
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in network.state_dict().items())
    with torch.no_grad():
        assert off(network(batch()), outputs) < 1e-4


def test_second_derivatives_through_silu_with_a_residual_are_torch_s() -> None:
    plain, network = built(Functional)[0].double(), cputrain.optimize(built(Functional)[0])

    def derivatives(each: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The gradient, and that of its square."""
        first = torch.autograd.grad(loss_of(each, dtype), list(each.parameters()), create_graph=True)
        torch.stack([value.square().sum() for value in first]).sum().backward()
        return torch.cat([value.detach().flatten() for value in first]), gradients_of(each)

    for value, exact in zip(derivatives(network, torch.float32), derivatives(plain, torch.float64), strict=True):
        assert off(value, exact) < 1e-5
