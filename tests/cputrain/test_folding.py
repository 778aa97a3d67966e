"""Evaluation by folded convolutions: the outputs of the network itself, which stays as it is."""

import gc
import os
import weakref
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from cputrain.kernels.batchnorm import load
from cputrain.kernels.convolution import has_amx, load_convolutions, pointwise_as_matmul, use_winograd
from cputrain.kernels.folding import CacheBlocked, FoldedConv2d, FoldedWinogradConv2d, fold_batchnorms
from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings
from cputrain.training.engine import autocast, choose_engine, evaluation_network, has_bf16, has_onednn
from tests.support.kernels import fuse_batchnorms

pytestmark = pytest.mark.slow


def trained(name: str, side: int) -> nn.Module:
    """A native network in evaluation, with statistics and parameters that are not the initial ones."""
    torch.manual_seed(2)
    network = build_model(ModelSettings(name=name), 10, side).to(memory_format=torch.channels_last)
    fuse_batchnorms(network, load(os.environ))
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.5, 0.5)
            layer.momentum = 1.0
    with torch.no_grad():
        network(torch.randn(8, 3, side, side))
    return network.eval()


@pytest.mark.skipif(not has_onednn(), reason="needs oneDNN")
@pytest.mark.parametrize(
    ("name", "side", "convolutions"),
    [
        ("resnet18", 64, 20),
        pytest.param("resnet50", 32, 53, marks=pytest.mark.long),
        ("alexnet-bn", 96, 5),
        ("torchvision:mobilenet_v2", 32, 52),
        pytest.param("torchvision:densenet121", 32, 59, marks=pytest.mark.long),
    ],
)
@torch.inference_mode()
def test_folded_networks_have_the_same_logits_and_top_1(name: str, side: int, convolutions: int) -> None:
    network = trained(name, side)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    images = torch.randn(16, 3, side, side).to(memory_format=torch.channels_last)
    folded = fold_batchnorms(network, torch.float32)
    assert sum(isinstance(layer, FoldedConv2d) for layer in folded.modules()) == convolutions
    got, expected = folded(images), network(images)
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert torch.equal(got.argmax(1), expected.argmax(1))
    after = network.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def relus(folded: nn.Module) -> int:
    """The number of ReLUs that a folded network computes apart."""
    graph = cast(fx.GraphModule, folded).graph
    layers = [folded.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"]
    return sum(isinstance(layer, nn.ReLU) for layer in layers) + sum(n.target is functional.relu for n in graph.nodes)


@pytest.mark.skipif(not has_onednn(), reason="needs oneDNN")
@torch.inference_mode()
def test_batch_norm_before_the_convolution_computes_its_relu() -> None:
    """If nothing sees or uses what is between them."""
    network = trained("torchvision:densenet121", 32)
    images = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
    expected = network(images)
    assert relus(fold_batchnorms(network, torch.float32)) == 0
    seen: list[Tensor] = []
    block = network.get_submodule("features.denseblock1")
    for layer in (block.denselayer1.norm1, block.denselayer2.relu1):
        layer.register_forward_hook(lambda _layer, _inputs, outputs: seen.append(outputs.clone()))
    folded = fold_batchnorms(network, torch.float32)
    assert relus(folded) == 2
    got = folded(images)
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert seen[0].min() < 0 <= seen[1].min()


class Twice(nn.Module):
    """Uses normalized maps with ReLU and without, and one batch-norm layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.relu = nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        first = self.norm(images)
        second = self.norm(functional.relu(first) - first)
        return self.relu(second) + self.norm(images + 1)


@torch.inference_mode()
def test_batch_norm_that_is_used_without_relu_keeps_it_apart() -> None:
    network = Twice().eval()
    fuse_batchnorms(network, load(os.environ))
    images = torch.randn(4, 4, 6, 6).to(memory_format=torch.channels_last)
    folded = fold_batchnorms(network, torch.float32)
    assert relus(folded) == 1
    assert torch.allclose(folded(images), network(images), atol=1e-5)


@pytest.mark.skipif(not has_onednn(), reason="needs oneDNN")
@pytest.mark.parametrize("name", ["resnet18", pytest.param("resnet50", marks=pytest.mark.long)])
@torch.inference_mode()
def test_winograd_layers_are_folded_with_bias_relu_and_residual(name: str) -> None:
    network = trained(name, 64)
    images = torch.randn(8, 3, 64, 64).to(memory_format=torch.channels_last)
    expected = network(images)
    use_winograd(network, load_convolutions(os.environ))
    folded = fold_batchnorms(network, torch.float32)
    assert sum(isinstance(layer, FoldedWinogradConv2d) for layer in folded.modules()) == 13
    got = folded(images)
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


class Features(nn.Module):
    """The first blocks of ResNet-50, with the outputs of the first block, or an early view of them, used again."""

    def __init__(self, whole: nn.Module, early: bool) -> None:
        super().__init__()
        self.blocks = cast(nn.Sequential, whole.layer1)
        self.early = early

    def forward(self, images: Tensor) -> Tensor:
        first = self.blocks[0](images)
        view = first.flatten(1) if self.early else first
        last = self.blocks[2](self.blocks[1](first))
        return torch.cat([view.flatten(1), last.flatten(1)], 1)


@pytest.mark.skipif(not has_onednn(), reason="needs oneDNN")
@pytest.mark.parametrize("early", [False, True])
@torch.inference_mode()
def test_a_residual_that_is_used_again_is_not_overwritten(early: bool) -> None:
    whole = trained("resnet50", 32)
    network = Features(whole, early).eval()
    images = torch.randn(4, 64, 8, 8)
    for given in (images, images.to(memory_format=torch.channels_last)):
        folded, expected = fold_batchnorms(network, torch.float32), network(given)
        # Of three blocks the first adds to its downsampled images and the last to the second's outputs.
        assert sum(isinstance(each, FoldedConv2d) and each.overwrites for each in folded.modules()) == 2
        got = folded(given)
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    folded = fold_batchnorms(whole, torch.float32)
    assert sum(isinstance(each, FoldedConv2d) and each.overwrites for each in folded.modules()) == 16


@torch.inference_mode()
def test_in_bf16_a_folded_network_is_as_near_to_float32_as_the_network_itself() -> None:
    native = choose_engine("native", "bf16", os.environ)
    network = trained("resnet50", 64)
    if has_amx():
        pointwise_as_matmul(network)
    folded = evaluation_network(network, native, "bf16")
    if not has_bf16():  # oneDNN refuses bfloat16 there
        assert folded is network
        return
    assert sum(isinstance(layer, FoldedConv2d) for layer in folded.modules()) == 53
    images = torch.randn(32, 3, 64, 64).to(memory_format=torch.channels_last)
    exact = network(images)
    with autocast("bf16"):
        off, expected = (float((each(images).float() - exact).square().mean()) for each in (folded, network))
    assert off <= 1.5 * expected


@pytest.mark.parametrize("side", [1, 8])
@torch.inference_mode()
def test_in_bf16_a_residual_may_come_in_float32(side: int) -> None:
    """As where no convolution is before a network's first block."""
    torch.manual_seed(1)
    network = nn.Sequential(build_model(ModelSettings(name="resnet18"), 10, 32).layer1[0])
    fuse_batchnorms(network, load(os.environ))
    network.to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    images = torch.randn(4, 64, side, side).to(memory_format=torch.channels_last)
    folded = fold_batchnorms(network, torch.bfloat16)
    if not has_bf16():  # oneDNN refuses bfloat16 there
        with pytest.raises(RuntimeError, match="bf16 path needs the cpu support"):
            folded(images)
        return
    with autocast("bf16"):
        got, expected = folded(images), network(images)
    assert got.dtype == expected.dtype == torch.bfloat16
    assert torch.allclose(got, expected, rtol=0.05, atol=0.05)


@pytest.mark.skipif(not has_onednn(), reason="needs oneDNN")
@torch.inference_mode()
def test_folded_weights_go_with_the_last_use_of_their_network() -> None:
    network = trained("resnet18", 32)
    gc.disable()  # which would find them in the end, after some more evaluations
    try:
        folded = fold_batchnorms(network, torch.float32)
        folded(torch.randn(1, 3, 32, 32).to(memory_format=torch.channels_last))
        weights = weakref.ref(next(layer for layer in folded.modules() if isinstance(layer, FoldedConv2d)))
        del folded
        assert weights() is None
    finally:
        gc.enable()


def test_a_network_that_cannot_be_traced_is_evaluated_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images if images.sum() > 0 else -images

    network = Odd()
    with caplog.at_level("INFO"):
        assert fold_batchnorms(network, torch.float32) is network
    assert "Odd cannot be traced: " in caplog.text


@torch.inference_mode()
def test_a_network_with_nan_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    """As oneDNN's ReLU would make it 0."""
    network = trained("resnet18", 32)
    network.get_submodule("layer1.0.bn1").weight[3] = float("nan")
    with caplog.at_level("INFO"):
        folded = fold_batchnorms(network, torch.float32)
    assert "evaluation without folding: layer1.0.bn1.weight is not finite" in caplog.text
    assert folded(torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)).isnan().all()


class Counted(nn.Module):
    """Per-pixel sums whose output is 2 MiB for each image of 8 x 8; keeps the sizes of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8192, 1)
        self.batches: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        self.batches.append(len(images))
        return self.layer(images).mean((2, 3))


@torch.inference_mode()
def test_batches_are_evaluated_in_blocks_that_fit_the_cache() -> None:
    torch.set_num_threads(1)
    network = Counted()
    blocked = CacheBlocked(network)
    images = torch.randn(20, 3, 8, 8)
    whole = network(images)
    for count in (20, 20, 9, 8, 0):
        assert torch.allclose(blocked(images[:count]), whole[:count], atol=1e-5)
    assert network.batches[1:] == [20, 7, 7, 6, 5, 4, 8, 0]
    torch.set_num_threads(5)
    try:
        assert torch.allclose(blocked(images[:9]), whole[:9], atol=1e-5)
        blocked.block = None
        assert len(blocked(images)) == 20 and blocked.block == 8
    finally:
        torch.set_num_threads(1)
    assert network.batches[9:] == [9, 20], "a block has an image for each thread"


@pytest.mark.parametrize("outputs", [lambda images: {"logits": images}, lambda images: images.sum()])
def test_networks_without_a_row_for_each_image_get_whole_batches(outputs: Callable[[Tensor], object]) -> None:
    class Network(nn.Module):
        def forward(self, images: Tensor) -> object:
            return outputs(images)

    blocked, images = CacheBlocked(Network()), torch.ones(12, 3, 512, 512)
    for _ in range(2):
        found = blocked(images)
        assert len(found["logits"]) == 12 if isinstance(found, dict) else float(found) == images.numel()
