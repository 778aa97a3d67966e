"""Networks, optimizer and accuracy, each against a plain reference."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.workload import footprint
from cputrain.data.loader import Normalize, choose_normalize
from cputrain.kernels.convolution import has_amx
from cputrain.kernels.norms import batchnorms
from cputrain.models.networks import build_model
from cputrain.optim import build_optimizer, set_lr_and_decay
from cputrain.recipe.request import workload_of
from cputrain.recipe.schema import DataSection, ModelSection, OptimSection, Recipe
from cputrain.training.engine import autocast, choose_engine, prepare_model
from cputrain.training.step import topk_hits

pytestmark = pytest.mark.slow

EAGER = choose_engine("eager", "float32", {})


def test_resnet50_is_the_real_one() -> None:
    model = build_model(ModelSection(name="resnet50", bn_decay=0.95), classes=1000, side=224)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    assert all(layer.momentum == pytest.approx(0.05) for layer in batchnorms(model))
    assert len(batchnorms(model)) == 53
    assert all((layer.weight == 1).all() for layer in batchnorms(model))


def test_zero_gamma_makes_blocks_identities() -> None:
    model = build_model(ModelSection(name="resnet18", zero_gamma="last_of_block"), classes=10, side=32)
    assert sum(bool((layer.weight == 0).all()) for layer in batchnorms(model)) == 8
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_engine_converts_weights_to_channels_last() -> None:
    model = prepare_model(
        build_model(ModelSection(name="resnet18"), classes=10, side=32),
        EAGER,
        "float32",
    )
    assert model.layer1[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_normalize_is_the_formula_and_channels_last(tmp_path: Path) -> None:
    data = DataSection()
    images = torch.randint(0, 256, (2, 5, 7, 3), dtype=torch.uint8)
    got = Normalize(data.mean, data.std, None)(images)
    expected = (images.permute(0, 3, 1, 2) / 255 - torch.tensor(data.mean).view(3, 1, 1)) / torch.tensor(data.std).view(
        3, 1, 1
    )
    assert torch.allclose(got, expected, atol=1e-5)
    assert got.is_contiguous(memory_format=torch.channels_last)
    for side in (1, 3, 16, 33):
        images = torch.randint(0, 256, (3, side, side + 1, 3), dtype=torch.uint8)
        assert torch.equal(
            choose_normalize(data.mean, data.std, data.decoder, os.environ)(images),
            Normalize(data.mean, data.std, None)(images),
        )
    bare = choose_normalize(data.mean, data.std, data.decoder, {"PATH": "/none", "CPUTRAIN_CACHE": str(tmp_path)})
    assert torch.equal(bare(images), Normalize(data.mean, data.std, None)(images)), "without a compiler"


@pytest.mark.parametrize("decay_all", [True, False])
def test_momentum_follows_a_plain_reference(decay_all: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))
    optimizer = build_optimizer(model, OptimSection(momentum=0.9, weight_decay=0.01, decay_bn_and_bias=decay_all))
    weights = [p.detach().clone() for p in model.parameters()]
    velocity = [torch.zeros_like(w) for w in weights]
    for step in range(20):
        rate = 0.1 / (step + 1)
        loss = model(torch.randn(8, 3, 8, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for w, v, p in zip(weights, velocity, model.parameters(), strict=True):
            decay = 0.01 if decay_all or w.ndim > 1 else 0.0
            v.mul_(0.9).add_(p.grad + decay * w)
            w.sub_(rate * v)
        set_lr_and_decay(optimizer, rate, 0.01)
        optimizer.step()
    for w, p in zip(weights, model.parameters(), strict=True):
        assert torch.allclose(w, p, rtol=1e-4, atol=1e-6)


def test_topk_hits_count_like_sorting() -> None:
    logits = torch.randn(50, 7)
    labels = torch.randint(0, 7, (50,))
    order = logits.argsort(dim=1, descending=True)
    for k in (1, 5, 9):
        expected = [float(label in row[:k]) for row, label in zip(order.tolist(), labels.tolist(), strict=True)]
        assert topk_hits(logits, labels, k).tolist() == expected


IMAGES = 11  # divides no layer's size


def kept_by(model: nn.Module, images: torch.Tensor, precision: str = "float32") -> tuple[torch.Tensor, int]:
    """The sum of a network's outputs, and the bytes of each image that autograd keeps for the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Images, or all their pixels one after the other: neither weights, their copies in bfloat16, nor statistics.
        if tensor.dim() and len(tensor) % len(images) == 0:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast(precision):
        loss = model(images).sum()
    return loss, sum(kept.values()) // len(images)


@pytest.mark.parametrize(("name", "side", "classes"), [("resnet18", 64, 1000), ("lenet", 28, 10), ("linear", 28, 10)])
def test_sizes_are_the_networks_own(name: str, side: int, classes: int) -> None:
    """Parameters, operations of a training step and what autograd keeps, counted on a real network with values."""
    expected = workload_of(Recipe(model=ModelSection(name=name, classes=classes), data=DataSection(crop=side)))
    model = build_model(ModelSection(name=name), classes, side).to(memory_format=torch.channels_last)
    assert sum(p.numel() for p in model.parameters()) == expected.parameters
    images = torch.zeros(IMAGES, 3, side, side).to(memory_format=torch.channels_last)
    with FlopCounterMode(display=False) as counter:
        loss, kept = kept_by(model, images)
        loss.backward()
    assert counter.get_total_flops() / IMAGES / 1e9 == pytest.approx(expected.gflop, rel=0.02)
    assert kept == pytest.approx(expected.activation_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("name", "side"),
    [("resnet18", 32), pytest.param("resnet50", 32, marks=(pytest.mark.long, pytest.mark.nightly)), ("alexnet-bn", 67)],
)
def test_native_layers_keep_what_torch_s_in_place_relu_keeps(name: str, side: int) -> None:
    """No mask and no output besides; half in bfloat16, but for what stays float32: the workload's share."""
    kept = {}
    built = build_model(ModelSection(name=name), 1000, side)
    for precision in ("float32", "bf16"):
        recipe = Recipe(model=ModelSection(name=name), data=DataSection(crop=side), precision=precision)
        for engine in ("eager", "native"):
            chosen = choose_engine(engine, precision, os.environ)
            model = prepare_model(copy.deepcopy(built), chosen, precision)
            images = torch.zeros(IMAGES, 3, side, side).to(memory_format=torch.channels_last)
            kept[precision, engine] = kept_by(model, images, precision)[1]
        strided = 0.02 if precision == "bf16" and has_amx() else 0.001  # products of every second pixel keep those
        assert kept[precision, "native"] == pytest.approx(kept[precision, "eager"], rel=strided)
        assert kept[precision, "native"] == pytest.approx(workload_of(recipe).activation_bytes, rel=0.1)
    assert 0.5 < kept["bf16", "native"] / kept["float32", "native"] < 0.6


def test_a_worker_in_bf16_needs_less_for_activations_and_a_copy_of_the_weights_more() -> None:
    wide, narrow = (footprint(workload_of(Recipe(precision=each)), 16) for each in ("float32", "bf16"))
    assert 0.5 < narrow.activations / wide.activations < 0.6
    assert narrow.weights == wide.weights * 3 // 2


def test_a_recipe_s_workload_scales_with_crop_and_classes() -> None:
    whole = workload_of(Recipe())
    small = workload_of(Recipe(model=ModelSection(classes=10), data=DataSection(crop=64)))
    assert whole.parameters - small.parameters == 990 * 2049
    assert small.gflop == pytest.approx(whole.gflop * (64 / 224) ** 2, rel=0.001)  # the last layer's do not shrink
    untraced = ModelSection(name="timm:levit_128", zero_gamma="none")
    assert workload_of(Recipe(model=untraced, data=DataSection(crop=64))).side == small.side == 64


@pytest.mark.long
def test_the_estimate_of_memory_is_near_what_a_training_takes() -> None:
    """A real training step in a process of its own; the estimate may be above by half, never much below.

    The process itself is measured, too: its share of the estimate is for other kernels.
    """
    code = (
        "import torch\n"
        "from cputrain.models.networks import build_model\n"
        "from cputrain.recipe.schema import ModelSection\n"
        # Not ru_maxrss, which begins with what the process that started this one had.
        "def resident(kind):\n"
        "    status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "    return int(status[kind].split()[0]) * 1024\n"
        "torch.set_num_threads(1)\n"
        "model = build_model(ModelSection(name='resnet50'), classes=1000, side=112)\n"
        "model.to(memory_format=torch.channels_last)\n"
        "built = resident('VmRSS')\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
        "for _ in range(2):\n"
        "    images = torch.zeros(8, 3, 112, 112).to(memory_format=torch.channels_last)\n"
        "    model(images).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "print(built, resident('VmHWM'))\n"
    )
    keep = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **keep}
    )
    recipe = Recipe(data=DataSection(crop=112))
    estimate = footprint(Runtime(cuda=torch.version.cuda is not None).holds(workload_of(recipe)), 8)
    built, peak = map(int, output.stdout.split())
    process = built - estimate.weights
    assert process < estimate.process  # a CUDA build of torch 2.13: 0.79 GB
    assert 0.9 < (estimate.total - estimate.process + process) / peak < 1.5
