"""Native weight gradients of convolutions in bfloat16: values, bits, strides, and the layers that use them."""

import copy
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cputrain.kernels.batchnorm import load
from cputrain.kernels.batchnorm_comparison import verify_kernels
from cputrain.kernels.convolution import (
    NativeWgradConv2d,
    has_amx,
    load_convolutions,
    native_weight_gradients,
    supports_winograd,
)
from cputrain.kernels.folding import fold_batchnorms
from cputrain.kernels.plan import Target
from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings
from cputrain.training.engine import choose_engine, prepare_model
from tests.support.convolutions import images_of, layer_of, passes
from tests.support.kernels import fuse_batchnorms

ROUNDING = 2**-8  # of a value to bfloat16


def direct(layer: nn.Conv2d) -> NativeWgradConv2d:
    made = copy.deepcopy(layer)
    native_weight_gradients(made, load_convolutions(os.environ))
    assert isinstance(made, NativeWgradConv2d)
    return made


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest one, in units of the largest expected value."""
    return float((got.double() - expected.double()).abs().max() / expected.abs().max())


pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=40)
@given(
    images=st.integers(1, 5),
    inputs=st.integers(1, 9).map(lambda n: 16 * n),
    outputs=st.integers(1, 5).map(lambda n: 16 * n),
    size=st.tuples(st.integers(3, 19), st.integers(3, 19)),
    kernel=pairs,
    stride=pairs,
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    count=st.sampled_from((1, 2)),
)
def test_weight_gradients_are_those_of_float64(
    images: int,
    inputs: int,
    outputs: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    count: int,
) -> None:
    torch.set_num_threads(count)
    x, weight = images_of(images, inputs, *size).bfloat16(), layer_of(inputs, outputs, kernel).weight.detach()
    exact = weight.double().requires_grad_()
    made = torch.conv2d(x.double(), exact, stride=stride, padding=padding)
    g = images_of(*made.shape).bfloat16()
    made.backward(g.double())
    got = load_convolutions(os.environ).direct_weight_gradient(x, g, weight, stride, padding)
    assert got.dtype == torch.float32 and got.stride() == weight.stride()
    assert exact.grad is not None and difference(got, exact.grad) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("images", "inputs", "outputs", "kernel", "stride", "side"),
    [(5, 64, 256, 1, 1, 56), (5, 512, 512, 3, 2, 14), (2, 96, 128, 5, 1, 27)],
)
def test_many_places_are_summed_in_float32(
    images: int, inputs: int, outputs: int, kernel: int, stride: int, side: int
) -> None:
    """More than a block of them, with a last one that is not full."""
    layer = layer_of(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    x = images_of(images, inputs, side, side).bfloat16()
    got, expected = passes(direct(layer), x), passes(copy.deepcopy(layer).double(), x.double())
    assert difference(got["weight"], expected["weight"]) < 1e-5


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("inputs", "outputs", "kernel", "stride"), [(80, 48, 3, 2), (512, 2048, 1, 1), (512, 2048, 1, 2)]
)
def test_all_passes_are_those_of_float64(inputs: int, outputs: int, kernel: int, stride: int, bias: bool) -> None:
    """Large 1 x 1 layers are matrix products."""
    layer = layer_of(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=bias)
    x, exact = images_of(2, inputs, 7, 10).bfloat16(), copy.deepcopy(layer).bfloat16().double()
    got, expected = passes(direct(layer), x), passes(exact, x.double())
    assert got.keys() == expected.keys()
    assert all(difference(got[name], value) < 2 * ROUNDING for name, value in expected.items())
    assert difference(got["weight"], expected["weight"]) < 1e-5
    assert got["outputs"].is_contiguous(memory_format=torch.channels_last)
    assert got["weight"].stride() == layer.weight.stride()  # DDP copies gradients of other strides


def test_any_number_of_threads_computes_the_same_bits() -> None:
    weight = direct(layer_of(64, 80, 3, padding=1)).weight.detach()
    kernels = load_convolutions(os.environ)
    for side in (14, 56):  # one part of the rows, and four
        x, g = (images_of(5, channels, side, side).bfloat16() for channels in (64, 80))
        torch.set_num_threads(1)
        expected = kernels.direct_weight_gradient(x, g, weight, (1, 1), (1, 1))
        for count in (2, 3, 22, 28):
            torch.set_num_threads(count)
            got = kernels.direct_weight_gradient(x, g, weight, (1, 1), (1, 1))
            assert torch.equal(got, expected), (side, count)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_number_spoils_the_weights_that_it_meets(value: float) -> None:
    layer, x = direct(layer_of(64, 16, 1, bias=False)), images_of(2, 64, 6, 6).bfloat16()
    x[1, 5, 2, 3] = value
    gradient = passes(layer, x)["weight"]
    assert not gradient[:, 5].isfinite().any() and gradient[:, :5].isfinite().all() and gradient[:, 6:].isfinite().all()


def test_other_layers_and_images_stay_with_torch() -> None:
    kernels = load_convolutions(os.environ)
    for layer in (
        nn.Conv2d(64, 64, 3, groups=2),
        nn.Conv2d(64, 64, 3, dilation=2),
        nn.Conv2d(64, 72, 3),
        nn.Conv2d(3, 64, 3),
        nn.Conv2d(48, 64, 3),
        nn.Conv2d(64, 64, 3, padding="same"),
        nn.Conv2d(64, 64, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(64, 64, 3).double(),
    ):
        native_weight_gradients(layer, kernels)
        assert type(layer) is nn.Conv2d
    layer = layer_of(64, 16, 3)
    made, x = direct(layer), images_of(2, 64, 5, 5)
    assert supports_winograd(made)  # Winograd's algorithm may replace it
    assert torch.equal(made(x), layer(x))  # float32
    with torch.autocast("cpu", torch.bfloat16):
        assert made(torch.zeros(64, 5, 5)).shape == (16, 3, 3)
        assert made(torch.zeros(0, 64, 5, 5)).shape == (0, 16, 3, 3)


@pytest.mark.parametrize("frozen", ["images", "weight"])
def test_what_is_frozen_has_no_gradient(frozen: str) -> None:
    layer, x = direct(layer_of(64, 16, 3)), images_of(2, 64, 5, 5).bfloat16().requires_grad_(frozen != "images")
    layer.weight.requires_grad_(frozen != "weight")
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).float().sum().backward()  # a gradient of strides 0
    assert (x.grad is None) == (frozen == "images") and (layer.weight.grad is None) == (frozen == "weight")


def test_such_layers_are_folded_for_evaluation() -> None:
    torch.manual_seed(0)
    network = build_model(ModelSettings(name="resnet18"), 10, 64).to(memory_format=torch.channels_last)
    fuse_batchnorms(network, verify_kernels(load(os.environ), os.environ))
    expected = fold_batchnorms(network, torch.float32)
    native_weight_gradients(network, load_convolutions(os.environ))
    assert sum(isinstance(one, NativeWgradConv2d) for one in network.modules()) == 19
    x = torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last)
    with torch.no_grad():
        assert torch.equal(fold_batchnorms(network, torch.float32)(x), expected(x))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_native_engine_uses_them_where_the_cpu_multiplies_bfloat16(precision: str) -> None:
    engine = choose_engine("native", precision, os.environ)
    network = prepare_model(build_model(ModelSettings(name="resnet18"), 10, 64), engine, precision)
    used = precision == "bf16" and load_convolutions(os.environ).multiplies_bf16 and not has_amx()
    assert any(isinstance(one, NativeWgradConv2d) for one in network.modules()) == used


@pytest.mark.slow
def test_without_them_the_native_engine_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler = tmp_path / "c++"
    # With -O1, the other kernels are compiled in a quarter of the time.
    compiler.write_text('#!/bin/sh\ncase "$*" in *weight_gradient.cpp*) exit 1;; esac\nexec c++ "$@" -O1\n')
    compiler.chmod(0o755)
    engine = choose_engine("native", "bf16", {**os.environ, "CXX": str(compiler), "CPUTRAIN_CACHE": str(tmp_path)})
    assert engine.name == "native" and engine.kernels.convolutions is None
    computes = "AVX512_BF16" in Target.here(torch.bfloat16).instructions and not has_amx()
    assert ("weight gradients are computed by torch" in caplog.text) == computes
