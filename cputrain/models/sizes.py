"""Sizes of the networks, for plans and predictions that must not load torch. The tests measure each again."""

from dataclasses import dataclass

from affinity.workload import Workload
from cputrain.recipe import Recipe

SIDE, CLASSES = 224, 1000  # what the figures below are for


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """parameters with 1000 classes, features before the last layer; per image at 224 x 224: operations of forward and
    backward pass in 1e9, bytes kept for the backward pass."""

    parameters: int
    features: int
    gflop: float
    activation_bytes: int


SIZES = {
    "resnet18": Size(parameters=11_689_512, features=512, gflop=10.65, activation_bytes=22_200_000),
    "resnet34": Size(parameters=21_797_672, features=512, gflop=21.75, activation_bytes=32_300_000),
    "resnet50": Size(parameters=25_557_032, features=2048, gflop=24.30, activation_bytes=86_100_000),
    "resnet101": Size(parameters=44_549_160, features=2048, gflop=46.57, activation_bytes=127_300_000),
    "resnet152": Size(parameters=60_192_808, features=2048, gflop=68.85, activation_bytes=178_000_000),
}


def workload_of(recipe: Recipe, classes: int = CLASSES) -> Workload:
    """What one worker computes under a recipe; operations and activations grow with the area of the crop."""
    size, area = SIZES[recipe.model.name], (recipe.data.crop / SIDE) ** 2
    return Workload(
        name=f"{recipe.model.name} at {recipe.data.crop} x {recipe.data.crop}",
        parameters=size.parameters + (classes - CLASSES) * (size.features + 1),
        gflop=size.gflop * area,
        activation_bytes=round(size.activation_bytes * area),
    )
