"""Winograd's convolutions: three passes against float64, whole networks, threads, and inputs that are not numbers."""

import copy
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cputrain.kernels.convolution import (
    ConvolutionShape,
    WinogradConv2d,
    load_convolutions,
    speedup,
    supports_winograd,
    use_winograd,
    winograd_shapes,
)
from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings
from tests.support.convolutions import images_of, layer_of, passes

pytestmark = pytest.mark.slow


def square(inputs: int, outputs: int, **options: object) -> nn.Conv2d:
    return layer_of(inputs, outputs, 3, **{"padding": 1, "bias": False, **options})


def winograd(layer: nn.Conv2d) -> WinogradConv2d:
    made = copy.deepcopy(layer)
    use_winograd(made, load_convolutions(os.environ))
    assert isinstance(made, WinogradConv2d)
    return made


def furthest(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, in units of the expected tensor's largest value."""
    assert got.keys() == expected.keys()
    return max(float((got[n].double() - one).abs().max() / one.abs().max()) for n, one in expected.items())


@settings(max_examples=25)
@given(
    images=st.integers(1, 5),
    inputs=st.integers(1, 9).map(lambda n: 16 * n),
    outputs=st.integers(1, 9).map(lambda n: 16 * n),
    height=st.integers(1, 19),
    width=st.integers(1, 19),
    padding=st.sampled_from((0, 1)),
    bias=st.booleans(),
    count=st.sampled_from((1, 2)),
)
def test_all_passes_are_those_of_float64(
    images: int, inputs: int, outputs: int, height: int, width: int, padding: int, bias: bool, count: int
) -> None:
    if padding == 0:
        height, width = height + 2, width + 2
    torch.set_num_threads(count)
    layer, x = square(inputs, outputs, padding=padding, bias=bias), images_of(images, inputs, height, width)
    assert furthest(passes(winograd(layer), x), passes(layer.double(), x.double())) < 5e-5


@pytest.mark.parametrize(("channels", "side"), [(64, 56), (512, 7), (256, 14), (128, 28)])
def test_the_layers_of_resnet50_are_close_to_float64(channels: int, side: int) -> None:
    layer, x = square(channels, channels), images_of(2, channels, side, side)
    assert furthest(passes(winograd(layer), x), passes(layer.double(), x.double())) < 5e-5


def test_bfloat16_is_rounded_once() -> None:
    layer, x = square(32, 48), images_of(3, 32, 13, 10)
    made = winograd(layer)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = made(x)
    exact = layer.double()(x.bfloat16().double())
    assert outputs.dtype == torch.bfloat16
    assert float((outputs.detach().double() - exact).abs().max() / exact.abs().max()) < 2**-8


def test_any_number_of_threads_computes_the_same_bits() -> None:
    """Also 22 and 28, as on hosts with as many cores a worker."""
    layer, x = winograd(square(64, 80)), images_of(5, 64, 14, 14)
    torch.set_num_threads(1)
    expected = passes(layer, x)
    for count in (2, 3, 22, 28):
        torch.set_num_threads(count)
        layer.zero_grad()
        got = passes(layer, x)
        assert all(torch.equal(got[name], value) for name, value in expected.items()), count


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_spoils_its_image_and_no_other(value: float) -> None:
    layer, x = winograd(square(16, 16)), images_of(3, 16, 12, 12)
    x[1, 5, 6, 7] = value
    outputs = layer(x).detach()
    assert outputs[0].isfinite().all() and outputs[2].isfinite().all()
    assert not outputs[1, :, 5:8, 6:9].isfinite().any()


def test_a_network_computes_and_learns_as_before() -> None:
    torch.manual_seed(0)
    network = build_model(ModelSettings(name="resnet18"), 10, 64).to(memory_format=torch.channels_last)
    fast = copy.deepcopy(network)
    use_winograd(fast, load_convolutions(os.environ))
    converted = [one for one in fast.modules() if isinstance(one, WinogradConv2d)]
    assert len(converted) == 13 and fast.state_dict().keys() == network.state_dict().keys()
    x = images_of(4, 3, 64, 64)
    got, expected = passes(fast, x), passes(network.double(), x.double())
    # Norms, as a value that rounding moves across ReLU's zero changes single gradients by much more.
    off = {name: float((got[name] - value).norm() / value.norm()) for name, value in expected.items()}
    assert max(off.values()) < 1e-3  # here 2e-5, direct convolutions 9e-6


def test_other_layers_and_images_stay_with_torch() -> None:
    for layer in (
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.Conv2d(16, 16, 3, padding=2),
        nn.Conv2d(16, 16, 3, padding=(1, 0)),
        nn.Conv2d(16, 16, 3, padding=(0, 1)),
        nn.Conv2d(16, 16, 3, padding=(1, 2)),
        nn.Conv2d(16, 16, 3, padding=1, groups=2),
        nn.Conv2d(16, 16, 3, padding=1, dilation=2),
        nn.Conv2d(16, 24, 3, padding=1),
        nn.Conv2d(3, 16, 3, padding=1),
        nn.Conv2d(16, 16, 1),
        nn.Conv2d(16, 16, 3, padding="same"),
        nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(16, 16, 3, padding=1).double(),
    ):
        assert not supports_winograd(layer)
    made = winograd(square(16, 16))
    assert made(torch.zeros(16, 5, 5)).shape == (16, 5, 5)
    assert made(torch.zeros(0, 16, 5, 5)).shape == (0, 16, 5, 5)
    with pytest.raises(RuntimeError):
        winograd(square(16, 16, padding=0))(torch.zeros(1, 16, 2, 2))


def test_the_shapes_of_a_network_are_those_of_its_layers() -> None:
    network = build_model(ModelSettings(name="resnet50"), 10, 224)
    before = copy.deepcopy(network.state_dict())
    found = winograd_shapes(network.train(), torch.zeros(1, 3, 224, 224))
    assert len(found) == 13 and network.training and network.layer1.training
    assert found["layer3.2.conv2"] == ConvolutionShape(inputs=256, outputs=256, height=14, width=14, padding=1)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_both_algorithms_are_timed() -> None:
    shape = ConvolutionShape(inputs=64, outputs=64, height=14, width=14, padding=1)
    assert 0.1 < speedup(shape, 4, torch.float32, load_convolutions(os.environ)) < 20
