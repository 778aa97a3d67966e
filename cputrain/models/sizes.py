"""Sizes of networks, without torch, from the files that tools/network_table.py writes: configs/networks/NAME.json."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from cputrain.affinity.planner.request import IMAGE_PIXELS, RESNET50, Workload
from cputrain.affinity.planner.step_time import CLASSES, LayerSize, layers_at
from cputrain.recipe.schema import LINE, NETWORKS, TORCHVISION, OptimSection, Recipe

SIDE = 224  # image side of all traced networks
BF16_KEPT = 0.55  # memory of activations with bf16 relative to float32; 0.51 to 0.59, depending on the network


# Tensors of the weights' size in an optimizer's state, with default options.
COPIES = {
    "sgd": 0,
    "momentum": 1,
    "lars": 1,
    "lamb": 2,
    "adam": 2,
    "adamw": 2,
    "rmsprop": 1,
    "adagrad": 1,
    "adadelta": 2,
    "adagrad_da": 3,
}


def network_file(name: str) -> Path:
    """Return the path of a network's sizes, which exists if it was traced. torchvision:resnet50 shares resnet50's, and
    timm:resnet50.a1_in1k, whose tag is of weights, timm:resnet50's."""
    file = NETWORKS / f"{name.replace(':', '/').partition('.')[0]}.json"
    return file if file.exists() else NETWORKS / f"{name.removeprefix(TORCHVISION)}.json"


_traced: dict[str, dict[str, Any]] = {}  # sizes by name, of networks without a file


def keep_network(name: str, sizes: dict[str, Any]) -> None:
    """Keep the sizes of a network that has no file, for this process."""
    _traced[name] = sizes
    read_network.cache_clear()


@lru_cache(maxsize=8)
def read_network(name: str) -> dict[str, Any] | None:
    """Read a network's sizes; None if it was not traced."""
    file = network_file(name)
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else _traced.get(name)


def gflop_of(layers: tuple[LayerSize, ...]) -> float:
    """Return the GFLOP of a forward and a backward pass, to four digits."""
    return float(f"{sum(sum(layer.flop) for layer in layers) / 1e9:.4g}")


def early_strides(layers: tuple[LayerSize, ...]) -> tuple[LayerSize, ...]:
    """Change a bottleneck ResNet's layers to resnet_version=v1, with the stride in each block's first convolution."""
    named = {layer.name: layer for layer in layers}
    for name, second in tuple(named.items()):
        if name.endswith(".conv2") and second.outputs != second.inputs:
            block, small = name.removesuffix("conv2"), second.outputs
            first = named[f"{block}conv1"]
            forward, backward = (each * small // second.inputs for each in first.flop)
            named[first.name] = replace(first, outputs=small, flop=(forward, backward))
            named[f"{block}bn1"] = replace(named[f"{block}bn1"], inputs=small, outputs=small)
            named[name] = replace(second, inputs=small)
    return tuple(named.values())


def layer_sizes(recipe: Recipe, classes: int = CLASSES) -> tuple[LayerSize, ...] | None:
    """Return the layers of a recipe's network at its crop; None if the network was not traced."""
    if recipe.data.path == LINE:
        return (LayerSize(name="fc", kind="linear", weights=(1, 1), inputs=1, outputs=1, flop=(2, 2)),)
    network = read_network(recipe.model.name)
    if network is None:
        return None
    layers = layers_at(network, recipe.data.crop, recipe.model.classes or classes)
    return early_strides(layers) if recipe.model.resnet_version == "v1" else layers


def workload_of(recipe: Recipe, classes: int = CLASSES) -> Workload:
    """Return the computation of one worker under a recipe; activations grow with the area of the crop.

    A network that was not traced is assumed to have ResNet-50's size, as stated in the workload's name.
    """
    name, side = recipe.model.name, 1 if recipe.data.path == LINE else recipe.data.crop
    layers, network = layer_sizes(recipe, classes), read_network(name)
    workload = replace(RESNET50, name=f"{name} at {side} x {side}, size assumed as ResNet-50's")
    if layers is not None and network is not None:
        workload = Workload(
            name=f"{name} at {side} x {side}",
            parameters=sum(sum(layer.weights) for layer in layers),
            gflop=gflop_of(layers),
            activation_bytes=round(network["activation_bytes"] * (side / network["side"]) ** 2),
        )
    kept = workload.activation_bytes * (BF16_KEPT if recipe.precision == "bf16" else 1.0)
    return replace(
        workload,
        activation_bytes=round(kept),
        decoder="Pillow" if recipe.data.decoder == "pillow" else "libjpeg-turbo",
        # Images of other data sets are assumed to have ImageNet's ratio of image to crop size.
        image_pixels=max(1, round(IMAGE_PIXELS * (side / SIDE) ** 2)),
        optimizer_copies=state_copies(recipe.optim) + (recipe.ema_decay is not None),
        precision=recipe.precision,
    )


def state_copies(optim: OptimSection) -> int:
    """Return the number of tensors of the weights' size in an optimizer's state."""
    if optim.name == "momentum" and optim.momentum == 0:
        return 0
    return COPIES[optim.name] + (optim.name == "rmsprop" and optim.momentum > 0)
