"""The output of a residual block that is used twice: its two gradients are added up by the layer that made it."""

import os
import weakref
from importlib.util import find_spec
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from cputrain.kernels.batchnorm import FUSED, FusedBatchNorm2d, load, residual_alias
from cputrain.kernels.norms import GhostBatchNorm2d
from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings
from cputrain.studies.bench.recorder import LayerRecorder
from tests.cputrain.test_batchnorm_relu import fused, images_of
from tests.support.kernels import fuse_batchnorms

pytestmark = pytest.mark.slow


def two_blocks() -> nn.Sequential:
    """Residual blocks of ResNet-18, one after the other, the second with a downsampling branch."""
    torch.manual_seed(5)
    network = build_model(ModelSettings(name="resnet18"), 10, 32)
    blocks = nn.Sequential(network.layer1[0], network.layer2[0]).to(memory_format=torch.channels_last)
    fuse_batchnorms(blocks, load(os.environ))
    return blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ghost_batch", [0, 2])
def test_gradients_of_two_uses_are_added_up_to_the_bit(
    dtype: torch.dtype, ghost_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = images_of((4, 64, 8, 8), 6)
    gradients = []
    uses = Mock(side_effect=residual_alias)
    for use in (uses, lambda outputs: outputs):
        monkeypatch.setattr("cputrain.kernels.fusion.residual_alias", use)
        blocks = two_blocks()
        for layer in blocks.modules():
            if ghost_batch and type(layer) is FusedBatchNorm2d:
                layer.__class__ = FUSED[GhostBatchNorm2d]
                layer.ghost_batch = ghost_batch
        given = images.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            outputs = blocks(given)
        outputs.backward(images_of(tuple(outputs.shape), 7).to(outputs.dtype))
        gradients.append([given.grad, *(parameter.grad for parameter in blocks.parameters())])
    (outputs,) = (call.args[0] for call in uses.call_args_list)
    assert residual_alias(outputs) is not outputs
    assert residual_alias(outputs).data_ptr() == outputs.data_ptr()
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


ALIASES = {"resnet18": 7, "resnet50": 15, "timm:resnet18": 7}
"""Blocks whose images are another block's outputs."""


@pytest.mark.parametrize(
    "name", ["resnet18", pytest.param("resnet50", marks=(pytest.mark.long, pytest.mark.nightly)), "timm:resnet18"]
)
def test_blocks_of_all_stages_add_up_gradients_if_nothing_sees_what_is_between(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []

    def used(outputs: torch.Tensor) -> torch.Tensor:
        given.append(residual_alias(outputs) is not outputs)
        return residual_alias(outputs)

    monkeypatch.setattr("cputrain.kernels.fusion.residual_alias", used)
    if name.startswith("timm:") and find_spec("timm") is None:
        pytest.skip("needs timm: pip install 'cputrain[timm]'")
    network = build_model(ModelSettings(name=name), 10, 32).to(memory_format=torch.channels_last)
    fuse_batchnorms(network, load(os.environ))

    def aliases() -> int:
        given.clear()
        network(images_of((2, 3, 32, 32), 1)).sum().backward()
        return sum(given)

    assert aliases() == ALIASES[name]
    if name.startswith("timm:"):
        network.set_grad_checkpointing()
        assert aliases() == 0
        return
    hook = network.layer1.register_forward_hook(lambda *_: None)
    assert aliases() == ALIASES[name] - 3  # those between stages
    hook.remove()
    assert aliases() == ALIASES[name]
    as_written = type(network)._forward_impl
    network._forward_impl = lambda x: as_written(network, x)
    assert aliases() == ALIASES[name] - 3


def test_changed_outputs_are_used_as_they_are_and_nothing_keeps_them() -> None:
    layer = fused(nn.BatchNorm2d(4))
    images, residual = (images_of((2, 4, 3, 3), seed).requires_grad_() for seed in (1, 2))
    outputs = layer(images, residual)
    assert residual_alias(outputs) is not outputs
    outputs.mul_(2)
    assert residual_alias(outputs) is outputs
    with torch.no_grad():
        outputs = layer(images, residual)
    assert residual_alias(outputs) is outputs
    outputs = layer(images, residual)
    (outputs + residual_alias(outputs)).sum().backward()
    kept = weakref.ref(outputs)
    del outputs
    assert kept() is None


@pytest.mark.parametrize("kind", ["hook", "kept"])
def test_whoever_watches_the_gradient_of_outputs_sees_the_sum_of_both(kind: str) -> None:
    layer = fused(nn.BatchNorm2d(4))
    images, residual = (images_of((2, 4, 3, 3), seed).requires_grad_() for seed in (1, 2))
    outputs, seen = layer(images, residual), []
    if kind == "hook":
        outputs.register_hook(seen.append)
    else:
        outputs.retain_grad()
    (outputs + 2 * residual_alias(outputs)).sum().backward()
    (gradient,) = seen or [outputs.grad]
    assert torch.equal(gradient, torch.full_like(outputs, 3))


def test_the_recorder_of_layers_changes_no_use() -> None:
    blocks, recorder = two_blocks(), LayerRecorder()
    with recorder.attached(blocks):
        outputs = blocks(images_of((2, 64, 8, 8), 3).requires_grad_())
        outputs.sum().backward()
    assert residual_alias(outputs) is not outputs
    layers = {name for name, kind in recorder.kinds.items() if kind != "ReLU"}  # which batch-norm has computed
    assert {name for name, _ in recorder.gradients} == {name for name, *_ in recorder.forwards} == layers


def test_one_use_alone_has_its_gradient() -> None:
    for used in (lambda outputs: outputs, residual_alias):
        layer = fused(nn.BatchNorm2d(4))
        images, residual = (images_of((2, 4, 3, 3), seed).requires_grad_() for seed in (1, 2))
        used(layer(images, residual)).sum().backward()
        assert residual.grad is not None and float(residual.grad.sum()) > 0
