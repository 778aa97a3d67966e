"""The files of networks against torch's own networks."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.workload import BYTES
from cputrain.models.networks import build_model
from cputrain.predict.assumptions import CONSTANTS
from cputrain.predict.collectives import bucket_bytes
from cputrain.predict.layers import NETWORKS, read_network
from cputrain.predict.step_time import DEFAULT_BUCKETS, Setup, assigned_buckets, bucket_limits, weight_tensors
from cputrain.recipe.request import workload_of
from cputrain.recipe.schema import OWN_NETWORKS, DataSection, ModelSection, Recipe
from cputrain.studies.simulate.predict import layers_of
from cputrain.studies.simulate.setup import trace_unknown
from tools.network_table import all_names, differences, main

needs_timm = pytest.mark.skipif(find_spec("timm") is None, reason="needs timm: pip install 'cputrain[timm]'")


def recipe_of(name: str, crop: int = 224, **model: str) -> Recipe:
    return Recipe(model=ModelSection.model_validate({"name": name, **model}), data=DataSection(crop=crop))


LARGE = (pytest.mark.long, pytest.mark.nightly)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LARGE if name == "resnet152" else ()) for name in OWN_NETWORKS]
)
def test_the_files_of_networks_are_what_is_traced(name: str) -> None:
    """Weights in their order, operations and activations."""
    assert differences(name) == []


@pytest.mark.parametrize(("name", "side"), [("resnet18", 71), ("alexnet-bn", 237), ("lenet", 37), ("mnist-cnn", 64)])
def test_the_layers_are_exact_at_any_side(name: str, side: int) -> None:
    assert [line for line in differences(name, side) if " saves " not in line] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "mobilenet_v3_small",
        "vit_b_32",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("googlenet", "regnet_x_400mf", "swin_t")),
    ],
)
def test_so_are_those_of_torchvision_s_classifiers(name: str) -> None:
    assert differences(f"torchvision:{name}") == []
    assert workload_of(recipe_of(f"torchvision:{name}")).assumed is False


@pytest.mark.slow
@needs_timm
@pytest.mark.parametrize(
    "name",
    [
        "convnext_atto",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("vit_tiny_patch16_224", "mobilenetv3_small_100")),
    ],
)
def test_so_are_those_of_timm_s(name: str) -> None:
    assert differences(f"timm:{name}") == []
    assert workload_of(recipe_of(f"timm:{name}.some_weights")).assumed is False


@pytest.mark.slow
@needs_timm
def test_a_network_of_timm_without_a_file_is_traced() -> None:
    recipe = recipe_of("timm:test_vit", 64)
    with pytest.raises(InputError, match=r"does not know the layers of model.name=timm:test_vit"):
        layers_of(recipe.model, recipe.data)
    trace_unknown(recipe.model.name, recipe.data.crop)
    weights = [p.numel() for p in build_model(recipe.model, classes=1000, side=64).parameters()]
    assert sum(sum(layer.weights) for layer in layers_of(recipe.model, recipe.data)) == sum(weights)


def test_a_wrong_file_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    wrong = (NETWORKS / "lenet.json").read_text().replace("[1500, 20]", "[1501, 20]")
    (tmp_path / "lenet.json").write_text(wrong)
    monkeypatch.setattr("cputrain.predict.layers.NETWORKS", tmp_path)
    read_network.cache_clear()
    try:
        assert main(["--check", "lenet"]) == 1
        assert "lenet at 28: ('conv1', 'conv', (1500, 20)" in capsys.readouterr().err
        assert main(["--check", "linear"]) == 1
        assert "linear has no file" in capsys.readouterr().err
    finally:
        read_network.cache_clear()


def test_every_classifier_of_torchvision_has_a_file() -> None:
    assert [name for name in all_names() if read_network(name) is None] == []


@pytest.mark.slow
def test_operations_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for version in ("v1", "v1.5"):
        recipe = recipe_of("resnet50", 64, resnet_version=version)
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            network: nn.Module = build_model(recipe.model, classes=1000, side=64)
            counter.flop_counts.clear()  # of the check that the network accepts its images
            network(torch.zeros(2, 3, 64, 64)).sum().backward()
        assert 2 * sum(sum(layer.flop) for layer in layers_of(recipe.model, recipe.data)) == pytest.approx(
            counter.get_total_flops()
        )


def test_networks_without_a_file_are_named() -> None:
    unknown = recipe_of("torchvision:vgg99")
    with pytest.raises(InputError, match=r"model.name=torchvision:vgg99.*set model.name to alexnet"):
        layers_of(unknown.model, unknown.data)


def setup(name: str, bucket_mib: float | None) -> Setup:
    recipe = recipe_of(name)
    return Setup(
        layers=layers_of(recipe.model, recipe.data),
        hosts=1,
        workers=2,
        threads=4,
        comm_cores=0,
        loader_cores=0,
        local_batch=8,
        bucket_mib=bucket_mib,
    )


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "alexnet"])
@pytest.mark.parametrize("mib", [DEFAULT_BUCKETS, 1.0, 7.5, 25.0])
def test_buckets_are_those_of_ddp(name: str, mib: float) -> None:
    """torch's own assignment of the gradients in the order in which the backward pass finishes them."""
    job = setup(name, mib)
    gradients = weight_tensors(job.layers)
    tensors = [torch.empty(size // BYTES, device="meta") for _, size in gradients]
    limits = list(dict.fromkeys(bucket_limits(job, CONSTANTS)))
    groups, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(tensors))
    expected = sorted((max(group), sum(gradients[i][1] for i in group)) for group in groups)
    assert [size for _, size in assigned_buckets(job, CONSTANTS)] == [size for _, size in expected]
    assert [layer for layer, _ in assigned_buckets(job, CONSTANTS)] == [gradients[last][0] for last, _ in expected]


def test_automatic_buckets_follow_the_trainers_rule() -> None:
    first, other = bucket_limits(setup("resnet50", None), CONSTANTS)
    assert first == other
    rate = 1 / CONSTANTS.core_move_bytes_per_s  # a ring of two sends each byte once in all
    assert other == pytest.approx(bucket_bytes(102_228_128, 2 * CONSTANTS.host_latency_s, rate), rel=0.01)
