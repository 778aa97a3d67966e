"""1 x 1 convolutions as matrix products: torch's own convolution beside them, in float64, and whole networks."""

import copy

import pytest
import torch
from torch import Tensor, nn

from cputrain.affinity.topology.sysfs import this_machine
from cputrain.kernels.convolution import PointwiseConv2d, has_amx, pointwise_as_matmul
from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings

pytestmark = pytest.mark.slow


def images_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype).to(memory_format=torch.channels_last)


def products_of(layer: nn.Module) -> nn.Module:
    """A copy that computes as products."""
    found = copy.deepcopy(layer)
    pointwise_as_matmul(found)
    return found


@pytest.mark.parametrize("stride", [1, 2, (2, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_the_convolution(stride: int | tuple[int, int], bias: bool) -> None:
    plain = nn.Conv2d(5, 7, 1, stride=stride, bias=bias, dtype=torch.float64).to(memory_format=torch.channels_last)
    product = products_of(plain)
    assert isinstance(product, PointwiseConv2d) and list(product.state_dict()) == list(plain.state_dict())
    results = []
    for layer in (plain, product):
        images = images_of(3, 5, 8, 9, dtype=torch.float64).requires_grad_()
        outputs = layer(images)
        outputs.backward(images_of(*outputs.shape, dtype=torch.float64))
        results.append((outputs, images.grad, *(parameter.grad for parameter in layer.parameters())))
        assert outputs.is_contiguous(memory_format=torch.channels_last)
        assert layer.weight.grad is not None and layer.weight.grad.stride() == layer.weight.stride()
    assert all(torch.allclose(got, expected) for expected, got in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("name", "products"),
    [
        pytest.param("resnet50", 36, marks=pytest.mark.long),
        ("resnet18", 3),
        ("torchvision:mobilenet_v2", 34),
        pytest.param("torchvision:resnext50_32x4d", 36, marks=(pytest.mark.long, pytest.mark.nightly)),
    ],
)
def test_a_network_s_1_x_1_layers_become_products_and_train_alike(name: str, products: int) -> None:
    torch.manual_seed(1)
    plain = build_model(ModelSettings(name=name), 10, 32).to(dtype=torch.float64, memory_format=torch.channels_last)
    network = products_of(plain)
    assert sum(isinstance(layer, PointwiseConv2d) for layer in network.modules()) == products
    images = images_of(2, 3, 32, 32, dtype=torch.float64)
    gradients = []
    for each in (plain.eval(), network.eval()):
        each(images).square().sum().backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    for expected, got in zip(*gradients, strict=True):
        assert torch.allclose(got, expected, atol=1e-9 * float(expected.abs().max()))


def test_in_bf16_a_product_is_as_near_to_float64_as_the_convolution() -> None:
    plain = nn.Conv2d(64, 96, 1, bias=False).to(memory_format=torch.channels_last)
    images = images_of(4, 64, 14, 14)
    exact = plain.double()(images.double())
    plain.float()
    with torch.autocast("cpu", torch.bfloat16):
        got = [layer(images) for layer in (plain, products_of(plain))]
    assert all(each.dtype == torch.bfloat16 for each in got)
    off, allowed = (float((each - exact).detach().abs().max()) for each in reversed(got))
    assert off <= 1.5 * allowed


def test_images_of_three_dimensions_are_those_of_the_convolution() -> None:
    """A network of one's own may convolve an image alone."""
    plain, image = nn.Conv2d(5, 7, 1, stride=2), torch.randn(5, 8, 9)
    assert torch.equal(products_of(plain)(image), plain(image))


def test_amx_is_what_the_kernel_lets_processes_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's flags do not have it before Linux 5.16, whatever the processor's own say."""
    assert "amx_bf16" in this_machine().isa or not has_amx()
    monkeypatch.setattr("torch.cpu._init_amx", lambda: False)
    assert not has_amx()


def test_other_convolutions_stay() -> None:
    layers = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 1, padding=1))
    assert not any(isinstance(layer, PointwiseConv2d) for layer in products_of(layers).modules())
