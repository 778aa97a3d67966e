"""The layer tables against torch's own networks."""

import pytest
import torch
from torch import distributed as dist
from torch import nn

from cputrain.affinity.errors import InputError
from cputrain.comm import bucket_bytes
from cputrain.models import SIZES, build_model
from cputrain.recipe import DataSection, ModelSection, Recipe
from cputrain.simulate import (
    BLOCKS,
    BYTES,
    CONSTANTS,
    DEFAULT_BUCKETS,
    Setup,
    assigned_buckets,
    bucket_limits,
    layers_of,
    weight_tensors,
)

NETWORKS = (*BLOCKS, "alexnet", "alexnet-bn")


def recipe_of(name: str, crop: int = 224, **model: str) -> Recipe:
    return Recipe(model=ModelSection.model_validate({"name": name, **model}), data=DataSection(crop=crop))


def parameters(name: str, crop: int = 224, **model: str) -> list[torch.Tensor]:
    recipe = recipe_of(name, crop, **model)
    with torch.device("meta"):
        return list(build_model(recipe.model, classes=1000, side=crop).parameters())


@pytest.mark.parametrize(
    ("name", "crop"), [("resnet18", 64), ("resnet50", 64), ("alexnet-bn", 64), ("lenet", 28), ("mnist-cnn", 28)]
)
def test_weights_are_those_of_the_network_in_its_order(name: str, crop: int) -> None:
    table = [size for layer in layers_of(recipe_of(name, crop)) for size in layer.weights]
    assert table == [tensor.numel() for tensor in parameters(name, crop)]


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_and_operations_add_up_to_the_sizes_that_plans_use(name: str) -> None:
    layers = layers_of(recipe_of(name))
    assert sum(sum(layer.weights) for layer in layers) == SIZES[name].parameters
    assert sum(sum(layer.flop) for layer in layers) / 1e9 == pytest.approx(SIZES[name].gflop, rel=0.01)


def test_operations_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for version in ("v1", "v1.5"):
        recipe = recipe_of("resnet50", 64, resnet_version=version)
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            network: nn.Module = build_model(recipe.model, classes=1000, side=64)
            counter.flop_counts.clear()  # of the check that the network accepts its images
            network(torch.zeros(2, 3, 64, 64)).sum().backward()
        assert 2 * sum(sum(layer.flop) for layer in layers_of(recipe)) == pytest.approx(counter.get_total_flops())


def test_frozen_or_unknown_networks_are_named() -> None:
    with pytest.raises(InputError, match=r"model.name=torchvision:vgg16.*set model.name to resnet18"):
        layers_of(recipe_of("torchvision:vgg16"))


def setup(name: str, bucket_mib: float | None) -> Setup:
    return Setup(
        layers=layers_of(recipe_of(name)),
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
